"""config.json to DecoderSpec: old files mean what transformers 5 makes of them; refusals by name."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig

from quantd.engine.models.architectures import decoder_spec
from quantd.quant.errors import CheckpointError, UnsupportedModelError

SIZES = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 4096,
}
LLAMA3 = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 1024,
    "rope_type": "llama3",
}
FACTORS = [1.0 + i / 8 for i in range(16)]

# In the form, and as sparse, as files of transformers 4 come.
OLD_FORM: dict[str, dict[str, Any]] = {
    "llama-2": {"model_type": "llama", **SIZES, "num_key_value_heads": 8, "torch_dtype": "float16"},
    "llama-3.1": {
        "model_type": "llama",
        **SIZES,
        "num_key_value_heads": 2,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
    },
    "llama-linear": {"model_type": "llama", **SIZES, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 4096, "rope_theta": 10000.0},
    "mistral-sparse": {"model_type": "mistral", **SIZES},
    "qwen2": {
        "model_type": "qwen2",
        **SIZES,
        "num_key_value_heads": 2,
        "use_sliding_window": False,
        "sliding_window": 131072,
        "max_window_layers": 5,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
    "qwen2-yarn": {
        "model_type": "qwen2",
        **SIZES,
        "num_key_value_heads": 2,
        "use_sliding_window": True,
        "sliding_window": 512,
        "max_window_layers": 5,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    },
    "qwen3": {"model_type": "qwen3", **SIZES, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 1e6},
    "smollm3": {"model_type": "smollm3", **SIZES, "num_key_value_heads": 4, "rope_theta": 5000000.0},
    "smollm3-window": {"model_type": "smollm3", **SIZES, "use_sliding_window": True, "sliding_window": 128},
    "granite": {"model_type": "granite", **SIZES, "attention_multiplier": 0.015, "logits_scaling": 16.0},
    "phi3": {"model_type": "phi3", **SIZES, "sliding_window": 2047, "rope_scaling": None},
    "phi3-long": {
        "model_type": "phi3",
        **SIZES,
        "original_max_position_embeddings": 1024,
        "rope_scaling": {"type": "longrope", "short_factor": FACTORS, "long_factor": FACTORS[::-1]},
    },
    "gemma2": {"model_type": "gemma2", **SIZES, "hidden_act": "gelu_pytorch_tanh", "rope_theta": 10000.0},
    "gemma3_text": {
        "model_type": "gemma3_text",
        **SIZES,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 20000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
    },
}


@pytest.mark.parametrize("name", OLD_FORM)
def test_old_files_mean_what_transformers_5_reads_in_them(name: str) -> None:
    old = OLD_FORM[name]
    new = AutoConfig.for_model(**deepcopy(old)).to_dict()
    assert "rope_theta" not in new
    assert decoder_spec(old) == decoder_spec(new)


@pytest.mark.parametrize("kind", ["su", "yarn"])
def test_older_names_of_longrope_in_phi3(kind: str) -> None:
    config = OLD_FORM["phi3-long"]
    older = {**config, "rope_scaling": {**config["rope_scaling"], "type": kind}}
    assert decoder_spec(older) == decoder_spec(config)


def test_a_multimodal_config_is_read_for_its_decoder() -> None:
    text = {
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    spec = decoder_spec(outer)
    assert replace(spec, model_type="gemma3_text") == decoder_spec(AutoConfig.for_model(**text).to_dict())
    assert (spec.vocab_size, spec.heads.head_dim, spec.tied) == (262208, 256, True)


def llama(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama", **SIZES, **changes}


@pytest.mark.parametrize(
    ("config", "error", "words"),
    [
        ({"model_type": "mamba"}, UnsupportedModelError, "mamba"),
        ({}, UnsupportedModelError, "None"),
        (llama(hidden_act="relu"), UnsupportedModelError, "relu"),
        (llama(rope_scaling={"rope_type": "mrope"}), UnsupportedModelError, "mrope"),
        (llama(rope_scaling={"rope_type": "linear"}), CheckpointError, "factor"),
        (llama(rope_scaling="linear"), CheckpointError, "rope_scaling"),
        ({"model_type": "bert"}, UnsupportedModelError, "'bert' is not supported; decoders are"),
        (llama(is_causal=False), UnsupportedModelError, "not causal"),
        (llama(use_bidirectional_attention=True), UnsupportedModelError, "use_bidirectional_attention"),
        (llama(num_key_value_heads=3), CheckpointError, "num_key_value_heads"),
        (llama(hidden_size=None), CheckpointError, "hidden_size"),
        (llama(vocab_size="1000"), CheckpointError, "vocab_size"),
        (llama(num_hidden_layers=0), CheckpointError, "num_hidden_layers"),
        (llama(num_hidden_layers=10**9), CheckpointError, "num_hidden_layers"),
        (llama(head_dim=33), UnsupportedModelError, "odd"),
        ({**OLD_FORM["qwen2"], "layer_types": ["chunked_attention"] * 8}, UnsupportedModelError, "chunked"),
        ({**OLD_FORM["qwen2"], "layer_types": ["full_attention"]}, CheckpointError, "layer_types"),
        ({**OLD_FORM["smollm3"], "no_rope_layers": [1]}, CheckpointError, "no_rope_layers"),
    ],
)
def test_what_quantd_does_not_have_is_refused_by_name(
    config: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        decoder_spec(config)


def test_the_served_length_is_the_models_unless_asked() -> None:
    assert decoder_spec(llama()).max_model_len == 4096
    assert decoder_spec(llama(), 512).max_model_len == 512
    with pytest.raises(UnsupportedModelError, match=r"5000.*4096"):
        decoder_spec(llama(), 5000)
    stretched = llama(rope_scaling={"rope_type": "dynamic", "factor": 2.0})
    assert decoder_spec(stretched, 8192).max_model_len == 8192
    with pytest.raises(UnsupportedModelError, match=r"8193.*8192"):
        decoder_spec(stretched, 8193)
