"""Models that people run on GPUs, by their sizes alone: their weights lie on torch's meta device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quantd.engine.devices import compute_dtype
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.models.decoder import Decoder
from quantd.engine.models.spec import DecoderSpec, LinearSpec
from quantd.engine.weights import DecoderWeights, LayerWeights
from quantd.kernels.gpu.ops import GpuOps
from quantd.kernels.gpu.tuning import Gpu, Tuning
from quantd.kernels.gpu.weights import STRIP, GpuWeight, Kind
from quantd.kernels.ops import QKNorm, RopeTable
from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight

META = torch.device("meta")
_BIAS = torch.zeros(STRIP)
GPUS = (
    Gpu("T4", 75, 40),
    Gpu("A100", 80, 108),
    Gpu("RTX 3060", 86, 28),
    Gpu("RTX 4090", 89, 128),
    Gpu("H100", 90, 132),
    Gpu("RTX 5090", 120, 170),
)


@dataclass(frozen=True)
class Form:
    """How a matrix is quantized. step: its scales; below 2**-14 they are kept in float32."""

    bits: int
    group: int
    symmetric: bool = True
    act_order: bool = False
    input_bits: int | None = None
    step: float = 2.0**-6


@dataclass(frozen=True)
class Model:
    """config: as in config.json. forms: of matrices by the last part of their name, None for plain ones.

    kv: formats of its cache.
    """

    config: Mapping[str, Any]
    form: Form | None
    forms: Mapping[str, Form | None] = field(default_factory=dict)
    kv: tuple[str, ...] = ("int8",)

    @property
    def spec(self) -> DecoderSpec:
        return decoder_spec(self.config)

    def dtype(self, gpu: Gpu) -> torch.dtype:
        """Of activations."""
        return compute_dtype(self.config, self.spec, [META]) if gpu.has_dots else torch.float16

    def decoder(self, gpu: Gpu, same_bits: bool) -> Decoder:
        ops = GpuOps("cpu", self.dtype(gpu), same_bits, tuning=Tuning(gpu))
        return _Maker(self, ops).decoder()


class _Maker:
    def __init__(self, model: Model, ops: GpuOps) -> None:
        self._model = model
        self._spec = model.spec
        self._ops = ops

    def decoder(self) -> Decoder:
        spec = self._spec
        vocabulary = spec.vocab_size, spec.hidden_size
        embedding = self._packed("embed_tokens", *vocabulary)
        head = embedding if spec.tied else self._packed("lm_head", *vocabulary)
        ropes = tuple(
            RopeTable(*torch.empty(2, spec.max_model_len, rope.rotary_dim // 2, device=META))
            for rope in spec.ropes
        )
        layers = (self._layer(),) * len(spec.layers)
        weights = DecoderWeights(embedding, layers, self._norm(spec.hidden_size), head, ropes)
        return Decoder(spec, weights, self._ops)

    def _layer(self) -> LayerWeights:
        spec, names = self._spec, self._spec.names
        qk_norm = QKNorm(*(self._norm(spec.heads.head_dim) for _ in range(2)), 1e-6) if names.q_norm else None
        after = [
            self._norm(spec.hidden_size) if name else None
            for name in (names.after_attention_norm, names.after_mlp_norm)
        ]
        return LayerWeights(
            attention_norm=self._norm(spec.hidden_size),
            qkv=(self._linear(spec.qkv("")),),
            qk_norm=qk_norm,
            o=(self._linear(spec.o("")),),
            after_attention_norm=after[0],
            mlp_norm=self._norm(spec.hidden_size),
            gate_up=(self._linear(spec.gate_up("")),),
            down=(self._linear(spec.down("")),),
            after_mlp_norm=after[1],
        )

    def _norm(self, size: int) -> Tensor:
        return torch.empty(size, device=META)

    def _linear(self, linear: LinearSpec) -> GpuWeight:
        name = linear.modules[0]
        has_bias = any(name.endswith(f".{biased}") for biased in self._spec.names.biases)
        return self._packed(name.rpartition(".")[2], sum(linear.num_outputs), linear.num_inputs, has_bias)

    def _packed(self, name: str, n: int, k: int, has_bias: bool = False) -> GpuWeight:
        """A weight of one strip, packed as any other, and made as large as it should be."""
        plain = self._model.form if name not in ("embed_tokens", "lm_head") else None
        form = self._model.forms.get(name, plain)
        bias = _BIAS if has_bias else None
        small = self._ops.pack(_plain(k) if form is None else _quantized(k, form), bias)
        found = {field.name: getattr(small, field.name) for field in fields(small)}
        tensors = {name: value.to(META) for name, value in found.items() if isinstance(value, Tensor)}
        if small.kind is Kind.DENSE:
            tensors["low"] = torch.empty(n, small.padded_k, dtype=small.low.dtype, device=META)
        if has_bias:
            tensors["bias"] = torch.empty(n, device=META)
        return replace(small, shape=(n, k), **tensors)


@cache
def _plain(k: int) -> Weight:
    return DenseWeight(torch.zeros(STRIP, k))


@cache
def _quantized(k: int, form: Form) -> Weight:
    group = form.group if form.group > 0 else k
    scale = torch.full((STRIP, -(-k // group)), form.step)
    zero = 2 ** (form.bits - 1) if form.symmetric else 2 ** (form.bits - 1) - 1
    perm = torch.arange(k).flip(0) if form.act_order else None
    codes = torch.zeros(STRIP, k, dtype=torch.uint8)
    return QuantizedWeight(codes, scale, -scale * zero, form.bits, group, perm, form.input_bits)


def _config(model_type: str, heads: tuple[int, int, int], sizes: tuple[int, int, int], **more: Any) -> Any:
    """heads: of queries, of keys, their size. sizes: hidden, of the MLP, of the vocabulary."""
    keys = ("num_attention_heads", "num_key_value_heads", "head_dim")
    keys += ("hidden_size", "intermediate_size", "vocab_size")
    return {
        "model_type": model_type,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **dict(zip(keys, (*heads, *sizes), strict=True)),
        **more,
    }


_LLAMA_8B = _config("llama", (32, 8, 128), (4096, 14336, 128256), max_position_embeddings=131072)
_LLAMA_FP16 = _LLAMA_8B | {"dtype": "float16"}
_MISTRAL = _config("mistral", (32, 8, 128), (4096, 14336, 32002), dtype="float16", sliding_window=None)
_QWEN2 = _config("qwen2", (28, 4, 128), (3584, 18944, 152064), dtype="float16")
_SMOLLM2 = _config("llama", (9, 3, 64), (576, 1536, 49152), tie_word_embeddings=True)
_DANUBE = _config("mistral", (32, 8, 80), (2560, 6912, 32000), sliding_window=4096)
_PHI3 = _config("phi3", (32, 32, 96), (3072, 8192, 32064), sliding_window=2047)
_SLIDING = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
_GEMMA2 = _config("gemma2", (16, 8, 256), (3584, 14336, 256000), **_SLIDING)
_GEMMA3 = _config("gemma3_text", (4, 1, 256), (1152, 6912, 262144), **_SLIDING)

_W4 = Form(4, 128)
_ALL_KV = ("int8", "fp16", "bf16")

MODELS = {
    "llama w4": Model(_LLAMA_8B, _W4, kv=_ALL_KV),
    "llama fp16 w4 act-order asym": Model(
        _LLAMA_FP16, Form(4, 128, symmetric=False, act_order=True), kv=_ALL_KV
    ),
    "llama w3": Model(_LLAMA_8B, Form(3, 128, symmetric=False)),
    "llama fp16 w3": Model(_LLAMA_FP16, Form(3, 128)),
    "llama w2 g64": Model(_LLAMA_8B, Form(2, 64, symmetric=False)),
    "llama fp16 w2 g64": Model(_LLAMA_FP16, Form(2, 64, symmetric=False)),
    "llama w8": Model(_LLAMA_8B, Form(8, 128)),
    "llama w8a8": Model(_LLAMA_8B, Form(8, 0, input_bits=8)),
    "llama fp16 w8a8": Model(_LLAMA_FP16, Form(8, 0, input_bits=8)),
    "llama plain": Model(_LLAMA_8B, None),
    "mistral w8 whole": Model(_MISTRAL, Form(8, 0)),
    "qwen2 w4": Model(_QWEN2, _W4, {"lm_head": Form(8, 128)}),
    "smollm2 gguf q4_1": Model(
        _SMOLLM2, Form(4, 32, symmetric=False), {"embed_tokens": Form(8, 32)}, kv=_ALL_KV
    ),
    "llama gguf q4_k_m": Model(
        _LLAMA_8B,
        Form(4, 32, symmetric=False, step=2.0**-15),
        {"down_proj": Form(6, 16), "embed_tokens": Form(4, 32, symmetric=False), "lm_head": Form(6, 16)},
    ),
    "mistral gguf q3_k_m": Model(
        _MISTRAL, Form(3, 16), {"down_proj": Form(5, 32, symmetric=False), "o_proj": Form(2, 16)}
    ),
    "danube w4": Model(_DANUBE, _W4, kv=_ALL_KV),
    "phi3 w4": Model(_PHI3, _W4, kv=_ALL_KV),
    "gemma2 w4": Model(_GEMMA2, _W4, kv=_ALL_KV),
    "gemma3 w4": Model(_GEMMA3 | {"sliding_window": 512}, Form(4, 32), {"embed_tokens": Form(6, 16)}),
}
