"""The config.json and generation_config.json that a GGUF header amounts to, in Hugging Face's form.

Source: llama.cpp's converters and model loaders for what a key means and for the facts the files leave
out; transformers' configuration classes for the names written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from quantd.quant.errors import CheckpointError, UnsupportedModelError
from quantd.quant.gguf_families import FAMILIES, Family
from quantd.quant.gguf_header import GgufHeader
from quantd.quant.gguf_index import GgufTensor
from quantd.quant.gguf_tokenizer import TokenType, Vocabulary

Config = dict[str, Any]

# Control tokens that end a turn in some chat format, whatever a file names as its end of sequence.
END_TOKENS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<end_of_turn>", "</s>", "<EOT>"),
)

# Block counts of the 27B Gemma models, whose queries are scaled by hidden_size / heads in place of head_dim.
GEMMA_27B_BLOCKS = {"gemma2": 46, "gemma3": 62}
GEMMA3_PATTERN = 6


def family_of(header: GgufHeader) -> Family:
    """The family of `header`; UnsupportedModelError names an architecture that is not in the table."""
    name = header.architecture
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{header.path}: architecture {name!r} is not supported (known: {', '.join(sorted(FAMILIES))})"
        )
    if header.integer(f"{name}.expert_count", 0):
        raise UnsupportedModelError(f"{header.path}: mixtures of experts are not supported")
    if not header.flag(f"{name}.attention.causal", True):
        raise UnsupportedModelError(f"{header.path}: attention that is not causal is not supported")
    return FAMILIES[name]


def build_config(header: GgufHeader, vocabulary: Vocabulary) -> Config:
    """config.json of the model `header` describes.

    Raises CheckpointError where a key is missing or contradicts the tensors, UnsupportedModelError for an
    architecture or an option that quantd does not have.
    """
    family = family_of(header)
    config = _shape(header, family)
    config |= _rope(header, config)
    config |= {key: vocabulary.special.get(name) for key, name in SPECIAL_IDS.items()}
    name = header.architecture
    config |= {
        key: header.number(f"{name}.{source}")
        for key, source in family.optional_numbers.items()
        if f"{name}.{source}" in header.metadata
    }
    if name in EXTRAS:
        config |= EXTRAS[name](header, config)
    return config


def build_pooling(header: GgufHeader) -> Config | None:
    """1_Pooling/config.json, as sentence-transformers writes it; None where nothing is said of pooling."""
    kind = header.integer(f"{header.architecture}.pooling_type", 0)
    return {"pooling_mode": POOLING_MODES.get(kind, str(kind))} if kind else None


# llama.cpp's enum llama_pooling_type, of which 0 is none.
POOLING_MODES = {1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}

SPECIAL_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "pad"}


def build_generation_config(vocabulary: Vocabulary) -> Config:
    """generation_config.json: every id that ends a turn, the named end of sequence first."""
    named = [vocabulary.special[key] for key in ("eos", "eot", "eom") if key in vocabulary.special]
    known = [
        index
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == TokenType.CONTROL and token in END_TOKENS
    ]
    ends = list(dict.fromkeys([*named, *known]))
    ids = {"bos_token_id": vocabulary.special.get("bos"), "pad_token_id": vocabulary.special.get("pad")}
    return {key: value for key, value in ids.items() if value is not None} | {"eos_token_id": ends}


def _shape(header: GgufHeader, family: Family) -> Config:
    name = header.architecture
    embedding = _tensor(header, "token_embd.weight", 2)
    hidden = header.integer(f"{name}.embedding_length")
    if embedding.shape[1] != hidden:
        raise CheckpointError(
            f"{header.path}: embedding_length is {hidden}, token_embd.weight is {list(embedding.shape)}"
        )
    heads = _positive(header, f"{name}.attention.head_count")
    layers = _positive(header, f"{name}.block_count")
    _tensor(header, f"blk.{layers - 1}.attn_norm.weight", 1)
    return {
        "architectures": [family.model_class],
        "model_type": family.model_type,
        "hidden_size": hidden,
        "intermediate_size": _positive(header, f"{name}.feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": header.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": _head_dim(header, hidden, heads),
        family.activation[0]: family.activation[1],
        "rms_norm_eps": header.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": _positive(header, f"{name}.context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }


def _positive(header: GgufHeader, key: str) -> int:
    value = header.integer(key)
    if value == 0:
        raise CheckpointError(f"{header.path}: GGUF key {key!r} is 0")
    return value


def _tensor(header: GgufHeader, name: str, dims: int) -> GgufTensor:
    tensor = header.tensors.get(name)
    if tensor is None or len(tensor.shape) != dims:
        raise CheckpointError(f"{header.path}: tensor {name!r} is missing or not {dims}-dimensional")
    return tensor


def _head_dim(header: GgufHeader, hidden: int, heads: int) -> int:
    """Rows of the query matrix tell it for certain; a fused matrix leaves the key, then the division."""
    if "blk.0.attn_q.weight" in header.tensors:
        return _tensor(header, "blk.0.attn_q.weight", 2).shape[0] // heads
    return header.integer(f"{header.architecture}.attention.key_length", hidden // heads)


def _rope(header: GgufHeader, config: Config) -> Config:
    name = header.architecture
    theta = header.number(f"{name}.rope.freq_base", 10000.0)
    rope: Config = {"rope_theta": theta}
    rotated = header.integer(f"{name}.rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        rope["partial_rotary_factor"] = rotated / config["head_dim"]
    scaling = _stored_scaling(header, config) or _tabulated_scaling(header, config, theta)
    if scaling:
        rope["rope_scaling"] = scaling
        if scaling["rope_type"] == "longrope":
            # Phi-3's configuration keeps it outside rope_scaling.
            rope["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return rope


def _stored_scaling(header: GgufHeader, config: Config) -> Config | None:
    """rope_scaling from the `rope.scaling.*` keys: linear and yarn."""
    prefix = f"{header.architecture}.rope.scaling"
    kind = header.metadata.get(f"{prefix}.type", "none")
    if kind == "none" or (kind == "longrope" and "rope_factors_long.weight" in header.tensors):
        return None
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{header.path}: rope scaling {kind!r} is not supported")
    scaling: Config = {"rope_type": kind, "factor": header.number(f"{prefix}.factor")}
    if kind == "yarn":
        context = header.integer(f"{prefix}.original_context_length", config["max_position_embeddings"])
        scaling["original_max_position_embeddings"] = context
        for name, key in YARN_KEYS.items():
            if f"{prefix}.{key}" in header.metadata:
                scaling[name] = header.number(f"{prefix}.{key}")
    return scaling


YARN_KEYS = {
    "attention_factor": "attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


def _tabulated_scaling(header: GgufHeader, config: Config, theta: float) -> Config | None:
    """rope_scaling from a tensor of divisors, one for each frequency.

    Llama 3's are recognised by their values and written as the rule that made them. Any other table is
    "longrope", HF's form for a table; with an attention factor of 1 it is exactly the division.
    """
    name = header.architecture
    if "rope_factors_long.weight" in header.tensors:
        context = header.integer(f"{name}.rope.scaling.original_context_length")
        return {
            "rope_type": "longrope",
            "type": "longrope",
            "long_factor": _floats(header, "rope_factors_long.weight"),
            "short_factor": _floats(header, "rope_factors_short.weight"),
            "original_max_position_embeddings": context,
        }
    if "rope_freqs.weight" not in header.tensors:
        return None
    factors = _floats(header, "rope_freqs.weight")
    if set(factors) == {1.0}:
        return None
    llama3 = LLAMA3_RULE | {"factor": max(factors)}
    if len(factors) == config["head_dim"] // 2 and np.allclose(
        factors, llama3_factors(llama3, theta, config["head_dim"]), rtol=1e-4
    ):
        return llama3
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "attention_factor": 1.0,
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


# What every published Llama 3.1 to 3.3 says beside its factor.
LLAMA3_RULE: Config = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama3_factors(rule: Config, theta: float, head_dim: int) -> list[float]:
    """What Llama 3's rule divides each of the head_dim // 2 rotary frequencies by."""
    context = rule["original_max_position_embeddings"]
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    divisors = []
    for pair in range(head_dim // 2):
        turns = context * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        blend = min(max((turns - low) / (high - low), 0.0), 1.0)
        divisors.append(1 / ((1 - blend) / rule["factor"] + blend))
    return divisors


def _floats(header: GgufHeader, name: str) -> list[float]:
    tensor = _tensor(header, name, 1)
    if tensor.type != "F32":
        raise UnsupportedModelError(f"{header.path}: tensor {name!r} is {tensor.type}, expected F32")
    with header.path.open("rb") as file:
        values = np.fromfile(file, "<f4", tensor.shape[0], offset=tensor.offset)
    if not np.isfinite(values).all() or (values <= 0).any():
        raise CheckpointError(f"{header.path}: tensor {name!r} holds values that are not positive")
    # The shortest decimal that reads back as the same float32.
    return [float(str(value)) for value in values]


def _window(header: GgufHeader) -> int | None:
    return header.integer(f"{header.architecture}.attention.sliding_window", 0) or None


def _llama(header: GgufHeader, config: Config) -> Config:
    """A llama file with a sliding window was a Mistral."""
    if _window(header) is None:
        return {}
    mistral = FAMILIES["mistral"]
    return {
        "model_type": mistral.model_type,
        "architectures": [mistral.model_class],
        "sliding_window": _window(header),
    }


def _phi3(header: GgufHeader, config: Config) -> Config:
    return {
        "sliding_window": _window(header),
        "original_max_position_embeddings": header.integer(
            "phi3.rope.scaling.original_context_length", config["max_position_embeddings"]
        ),
    }


def _smollm3(header: GgufHeader, config: Config) -> Config:
    """llama.cpp leaves out the rotation in every fourth layer without a key; a 1 means it is applied."""
    layers = config["num_hidden_layers"]
    return {"no_rope_layer_interval": 4, "no_rope_layers": [int((i + 1) % 4 != 0) for i in range(layers)]}


def _gemma(header: GgufHeader, config: Config, period: int) -> Config:
    name = header.architecture
    layers = config["num_hidden_layers"]
    scale = config["head_dim"]
    if layers == GEMMA_27B_BLOCKS[name]:
        scale = config["hidden_size"] // config["num_attention_heads"]
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(layers)]
    return {"query_pre_attn_scalar": scale, "sliding_window": _window(header), "layer_types": kinds}


def _gemma2(header: GgufHeader, config: Config) -> Config:
    return _gemma(header, config, 2)


def _gemma3(header: GgufHeader, config: Config) -> Config:
    theta = header.number("gemma3.rope.freq_base", 1_000_000.0)
    local = header.number("gemma3.rope.freq_base_swa", 10000.0)
    return _gemma(header, config, GEMMA3_PATTERN) | {
        "rope_theta": theta,
        "rope_local_base_freq": local,
        "sliding_window_pattern": GEMMA3_PATTERN,
    }


EXTRAS: dict[str, Callable[[GgufHeader, Config], Config]] = {
    "llama": _llama,
    "mistral": _llama,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
