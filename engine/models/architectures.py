"""Which architectures there are: a table from config.json's model_type to a DecoderSpec.

Configurations of transformers 4 (rope_theta, rope_scaling) and 5 (rope_parameters) are read alike;
a value that a config leaves out is that of the Hugging Face configuration class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quantd.engine.layers.rope import RopeSpec, rope_scaling
from quantd.engine.models.spec import DecoderSpec, LayerNames, LayerSpec
from quantd.kernels.ops import Activation, HeadShape
from quantd.quant.errors import CheckpointError, UnsupportedModelError


def decoder_spec(config: Mapping[str, Any], max_model_len: int | None = None) -> DecoderSpec:
    """The decoder that a config.json describes, to be served at max_model_len (None: the model's own).

    Raises UnsupportedModelError for an architecture, option or length that quantd does not have,
    CheckpointError for a value that is missing or senseless.
    """
    fields = _Fields(config)
    model_type = fields.get("model_type")
    architecture = _ARCHITECTURES.get(str(model_type))
    if architecture is None:
        known = ", ".join(_ARCHITECTURES)
        raise UnsupportedModelError(
            f"architecture {model_type!r} is not supported; decoders are, of these kinds: {known}"
        )
    fields = fields.over(architecture.defaults)
    if fields.get("use_bidirectional_attention"):
        raise UnsupportedModelError(f"{model_type}: use_bidirectional_attention is not supported")
    if fields.get("is_causal") is False:
        raise UnsupportedModelError(f"{model_type}: attention that is not causal is not supported")
    spec = architecture.build(fields)
    return spec if max_model_len is None else _served_at(spec, max_model_len)


def _served_at(spec: DecoderSpec, max_model_len: int) -> DecoderSpec:
    limit = max(spec.max_model_len, *(rope.scaling.max_len for rope in spec.ropes))
    if max_model_len > limit:
        raise UnsupportedModelError(f"max_model_len {max_model_len} is beyond this model's {limit} tokens")
    return replace(spec, max_model_len=max_model_len)


class _Fields:
    """A config's values over a class's defaults, read with a complaint that names the key."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        # A multimodal config keeps the decoder's values one level down.
        self._values = {**values, **(values.get("text_config") or {}), "model_type": values.get("model_type")}

    def over(self, defaults: Mapping[str, Any]) -> _Fields:
        return _Fields({**defaults, **self._values})

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise CheckpointError(f"config.json: {key} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CheckpointError(f"config.json: {key} must be a number, got {value!r}")
        return float(value)

    def softcap(self, key: str) -> float:
        return 0.0 if self.get(key) is None else self.number(key)

    @property
    def num_layers(self) -> int:
        number = self.integer("num_hidden_layers")
        if number > _MAX_LAYERS:
            raise CheckpointError(f"config.json: num_hidden_layers is {number}, more than {_MAX_LAYERS}")
        return number

    def window(self) -> int:
        return 0 if self.get("sliding_window") is None else self.integer("sliding_window")

    def layer_types(self, is_sliding: Callable[[int], bool]) -> list[str]:
        """One of _LAYER_TYPES for each layer; is_sliding decides where the config does not say."""
        types = self.get("layer_types")
        if types is None:
            return [_LAYER_TYPES[is_sliding(i)] for i in range(self.num_layers)]
        if len(types) != self.num_layers:
            raise CheckpointError(f"config.json: layer_types has {len(types)} of {self.num_layers} layers")
        unknown = sorted({str(kind) for kind in types} - set(_LAYER_TYPES))
        if unknown:
            raise UnsupportedModelError(f"layer types are not supported: {', '.join(unknown)}")
        return list(types)


_LAYER_TYPES = ("full_attention", "sliding_attention")

# Far beyond any model, and few enough to be told which tensors of them are missing.
_MAX_LAYERS = 10_000

_ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def _activation(name: object) -> Activation:
    if name not in _ACTIVATIONS:
        raise UnsupportedModelError(f"activation {name!r} is not supported (have: {', '.join(_ACTIVATIONS)})")
    return _ACTIVATIONS[str(name)]


def _heads(fields: _Fields) -> HeadShape:
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"config: num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = fields.integer("head_dim", fields.integer("hidden_size") // num_heads)
    return HeadShape(num_heads, num_kv_heads, head_dim)


def _rope(fields: _Fields, parameters: Mapping[str, Any], base: float) -> RopeSpec:
    """The table of a config's rope parameters; base: where they hold none."""
    if parameters.keys() & set(_LAYER_TYPES):
        raise UnsupportedModelError("rope_parameters for each layer type are not supported here")
    outer = fields.get("original_max_position_embeddings")
    if outer is not None:
        parameters = {**parameters, "original_max_position_embeddings": outer}
    partial = parameters.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1.0
    rotary_dim = int(_heads(fields).head_dim * partial)
    if rotary_dim % 2:
        raise UnsupportedModelError(f"rotary embedding of an odd number of elements ({rotary_dim})")
    base = float(parameters.get("rope_theta") or base)
    return RopeSpec(base, rotary_dim, rope_scaling(parameters, fields.integer("max_position_embeddings")))


def _parameters(fields: _Fields) -> Mapping[str, Any]:
    parameters = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError(f"config.json: rope_scaling must be an object, got {parameters!r}")
    return parameters


def _common(fields: _Fields, rope_parameters: Mapping[str, Any] | None = None) -> DecoderSpec:
    """A Llama; the other architectures are told as their differences from it."""
    parameters = _parameters(fields) if rope_parameters is None else rope_parameters
    names, heads = LayerNames(), _heads(fields)
    attention_biases = (*names.qkv, names.o) if fields.get("attention_bias") else ()
    mlp_biases = (*names.gate_up, names.down) if fields.get("mlp_bias") else ()
    return DecoderSpec(
        model_type=str(fields.get("model_type")),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        heads=heads,
        layers=(LayerSpec(),) * fields.num_layers,
        ropes=(_rope(fields, parameters, fields.number("rope_theta", 10_000.0)),),
        max_model_len=fields.integer("max_position_embeddings"),
        norm_eps=fields.number("rms_norm_eps"),
        attention_scale=heads.head_dim**-0.5,
        tied=bool(fields.get("tie_word_embeddings")),
        names=replace(names, biases=attention_biases + mlp_biases),
        activation=_activation(fields.get("hidden_activation") or fields.get("hidden_act")),
    )


def _windowed(spec: DecoderSpec, types: Sequence[str], window: int) -> DecoderSpec:
    """Sliding layers see `window` tokens, the others all."""
    layers = zip(spec.layers, types, strict=True)
    return replace(
        spec,
        layers=tuple(replace(x, window=window if kind == "sliding_attention" else 0) for x, kind in layers),
    )


def _mistral(fields: _Fields) -> DecoderSpec:
    return _windowed(_common(fields), ["sliding_attention"] * fields.num_layers, fields.window())


def _qwen2(fields: _Fields) -> DecoderSpec:
    spec = _qwen(fields)
    return replace(spec, names=replace(spec.names, biases=spec.names.qkv))


def _qwen3(fields: _Fields) -> DecoderSpec:
    spec = _qwen(fields)
    names = replace(spec.names, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm")
    return replace(spec, names=names)


def _qwen(fields: _Fields) -> DecoderSpec:
    window = fields.window() if fields.get("use_sliding_window") else 0
    full_layers = fields.integer("max_window_layers")
    return _windowed(_common(fields), fields.layer_types(lambda i: i >= full_layers), window)


def _smollm3(fields: _Fields) -> DecoderSpec:
    spec = _common(fields)
    interval = fields.integer("no_rope_layer_interval")
    rotates = fields.get("no_rope_layers") or [(i + 1) % interval for i in range(fields.num_layers)]
    if len(rotates) < fields.num_layers:
        raise CheckpointError(f"config.json: no_rope_layers has {len(rotates)} of {fields.num_layers} layers")
    ropes = rotates[: fields.num_layers]
    spec = replace(spec, layers=tuple(LayerSpec(rope=0 if rope else None) for rope in ropes))
    window = fields.window() if fields.get("use_sliding_window") else 0
    return _windowed(spec, fields.layer_types(lambda i: not rotates[i]), window)


def _granite(fields: _Fields) -> DecoderSpec:
    return replace(
        _common(fields),
        embedding_scale=fields.number("embedding_multiplier"),
        attention_scale=fields.number("attention_multiplier"),
        residual_scale=fields.number("residual_multiplier"),
        logits_scale=1 / fields.number("logits_scaling"),
    )


def _phi3(fields: _Fields) -> DecoderSpec:
    parameters = dict(_parameters(fields))
    # Older files call the same scaling by these names.
    if (parameters.get("rope_type") or parameters.get("type")) in ("su", "yarn"):
        parameters["rope_type"] = "longrope"
    names = LayerNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))
    spec = replace(_common(fields, parameters), names=names)
    return _windowed(spec, ["sliding_attention"] * fields.num_layers, fields.window())


def _gemma2(fields: _Fields) -> DecoderSpec:
    spec = _gemma(fields, _parameters(fields))
    spec = replace(spec, attention_softcap=fields.softcap("attn_logit_softcapping"))
    return _windowed(spec, fields.layer_types(lambda i: i % 2 == 0), fields.window())


def _gemma3(fields: _Fields) -> DecoderSpec:
    parameters = _parameters(fields)
    if not parameters.keys() & set(_LAYER_TYPES):
        parameters = {"full_attention": parameters}
    spec = _gemma(fields, parameters.get("full_attention") or {})
    sliding_base = fields.number("rope_local_base_freq", 10_000.0)
    sliding = _rope(fields, parameters.get("sliding_attention") or {}, sliding_base)
    interval = fields.integer("sliding_window_pattern", 6)
    types = fields.layer_types(lambda i: (i + 1) % interval != 0)
    layers = zip(_windowed(spec, types, fields.window()).layers, types, strict=True)
    return replace(
        spec,
        names=replace(spec.names, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
        ropes=(*spec.ropes, sliding),
        layers=tuple(replace(layer, rope=_LAYER_TYPES.index(kind)) for layer, kind in layers),
    )


def _gemma(fields: _Fields, parameters: Mapping[str, Any]) -> DecoderSpec:
    spec = _common(fields, parameters)
    names = replace(
        spec.names,
        after_attention_norm="post_attention_layernorm",
        mlp_norm="pre_feedforward_layernorm",
        after_mlp_norm="post_feedforward_layernorm",
    )
    return replace(
        spec,
        names=names,
        norm_offset=1.0,
        embedding_scale=spec.hidden_size**0.5,
        attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
        logits_softcap=fields.softcap("final_logit_softcapping"),
    )


@dataclass(frozen=True)
class _Architecture:
    """How a config becomes a spec. defaults: what the config may leave out."""

    build: Callable[[_Fields], DecoderSpec]
    defaults: Mapping[str, Any]


_LLAMA = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_QWEN = {
    **_LLAMA,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA2 = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "tie_word_embeddings": True,
}
_GEMMA3 = {
    **_GEMMA2,
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "max_position_embeddings": 131072,
    "rope_theta": 1_000_000.0,
    "final_logit_softcapping": None,
    "attn_logit_softcapping": None,
}
_GRANITE = dict.fromkeys(
    ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"), 1.0
)
_SMOLLM3 = {
    "max_position_embeddings": 32768,
    "rope_theta": 2_000_000.0,
    "num_key_value_heads": 4,
    "no_rope_layer_interval": 4,
    "tie_word_embeddings": True,
}
_PHI3 = {
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}

_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(_common, _LLAMA),
    "mistral": _Architecture(
        _mistral,
        {**_LLAMA, "max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "qwen2": _Architecture(_qwen2, _QWEN),
    "qwen3": _Architecture(_qwen3, {**_QWEN, "head_dim": 128}),
    "smollm3": _Architecture(_smollm3, {**_LLAMA, **_SMOLLM3}),
    "granite": _Architecture(_granite, {**_LLAMA, **_GRANITE}),
    "phi3": _Architecture(_phi3, {**_LLAMA, **_PHI3}),
    "gemma2": _Architecture(_gemma2, _GEMMA2),
    "gemma3_text": _Architecture(_gemma3, _GEMMA3),
    "gemma3": _Architecture(_gemma3, _GEMMA3),
}
