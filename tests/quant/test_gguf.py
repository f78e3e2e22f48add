"""Tiny models of every architecture, written as llama.cpp's converter does, come back as they were."""

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import tiny_model, write_model, write_tiny
from transformers import AutoConfig, AutoModelForCausalLM

from quantd.kernels.weights import DenseWeight, QuantizedWeight
from quantd.quant.errors import CheckpointError, UnsupportedModelError
from quantd.quant.gguf import GgufCheckpoint, decode_blocks, open_gguf
from quantd.quant.gguf_blocks import BLOCK_FORMATS
from quantd.quant.gguf_config import LLAMA3_RULE, llama3_factors
from quantd.quant.gguf_import import import_gguf


def imported(tmp_path: Path, *args: Any, **kwargs: Any) -> GgufCheckpoint:
    write_model(tmp_path / "tiny.gguf", *args, **kwargs)
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    return open_gguf(tmp_path / "model")


def rebuilt(checkpoint: GgufCheckpoint) -> torch.nn.Module:
    """transformers' model of the written config.json with the checkpoint's tensors."""
    config = AutoConfig.from_pretrained(checkpoint.path)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    state = {name: checkpoint.tensor(name, tuple(value.shape)) for name, value in stored(model).items()}
    assert set(state) == set(checkpoint.names())
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    return model.eval()


def stored(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    state = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    return state


def theta(value: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": value}}


LLAMA3 = LLAMA3_RULE | {"factor": 8.0, "rope_theta": 500000.0}
LONG = [1.0 + 0.5 * index for index in range(8)]

# architecture, HF model type, HF settings, GGUF keys beside the common ones, extra tensors
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, list[float]]]] = {
    "llama": ("llama", "llama", {"tie_word_embeddings": False}, {"rope.dimension_count": 16}, {}),
    "llama-bias": (
        "llama",
        "llama",
        {
            "attention_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
        },
        {"rope.freq_base": 5000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        {},
    ),
    "llama3": (
        "llama",
        "llama",
        {"rope_parameters": LLAMA3},
        {"rope.freq_base": 500000.0},
        {"rope_freqs.weight": llama3_factors(LLAMA3, 500000.0, 16)},
    ),
    "llama-table": (
        "llama",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "long_factor": LONG,
                "short_factor": LONG,
                "attention_factor": 1.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 512,
            }
        },
        {},
        {"rope_freqs.weight": LONG},
    ),
    "llama-yarn": (
        "llama",
        "llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 128,
            }
        },
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
        },
        {},
    ),
    "mistral": ("llama", "mistral", {"sliding_window": 8}, {"attention.sliding_window": 8}, {}),
    "qwen2": ("qwen2", "qwen2", {"tie_word_embeddings": True} | theta(1e6), {"rope.freq_base": 1e6}, {}),
    "qwen3": ("qwen3", "qwen3", {"head_dim": 32}, {"attention.key_length": 32, "rope.freq_base": 1e4}, {}),
    "smollm3": ("smollm3", "smollm3", {"num_hidden_layers": 5} | theta(5e6), {"rope.freq_base": 5e6}, {}),
    "granite": (
        "granite",
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 8.0,
        },
        {"attention.scale": 0.2, "embedding_scale": 12.0, "residual_scale": 0.22, "logit_scale": 8.0},
        {},
    ),
    "phi3": (
        "phi3",
        "phi3",
        {"sliding_window": 8},
        {"attention.sliding_window": 8, "rope.scaling.original_context_length": 512},
        {},
    ),
    "phi3-long": (
        "phi3",
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": {
                "rope_type": "longrope",
                "long_factor": LONG,
                "short_factor": [1.0] * 8,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 128,
            },
        },
        {"attention.sliding_window": 0, "rope.scaling.original_context_length": 128},
        {"rope_factors_long.weight": LONG, "rope_factors_short.weight": [1.0] * 8},
    ),
    "gemma2": (
        "gemma2",
        "gemma2",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 3},
        {
            "attention.key_length": 32,
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        {},
    ),
    "gemma3": (
        "gemma3",
        "gemma3_text",
        {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7},
        {"attention.key_length": 32, "attention.sliding_window": 8, "rope.freq_base": 1e6},
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_model_comes_back(case: str, tmp_path: Path) -> None:
    architecture, model_type, settings, metadata, tables = CASES[case]
    model = tiny_model(model_type, **settings)
    extra = {name: np.array(values, np.float32) for name, values in tables.items()}
    checkpoint = imported(tmp_path, model, architecture, metadata=metadata, extra_tensors=extra)
    again = rebuilt(checkpoint)
    for name, value in stored(model).items():
        torch.testing.assert_close(again.state_dict()[name], value, rtol=0, atol=3e-7, msg=name)
    tokens = torch.randint(288, (1, 160), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected, found = model(tokens).logits, again(tokens).logits
    assert (found - expected).abs().max() / expected.abs().max() < 1e-5


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_linear_is_what_transformers_reads(kind: Kind, tmp_path: Path) -> None:
    """transformers undoes the q/k permutation and dequantizes in its own way."""
    checkpoint = imported(tmp_path, tiny_model("llama"), "llama", kind, {"rope.dimension_count": 16})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="tiny.gguf", dtype=torch.float32)
    for name, value in theirs.state_dict().items():
        if value.ndim == 2 and ".layers." in name:
            weight = checkpoint.linear(name.removesuffix(".weight"), tuple(value.shape))
            assert isinstance(weight, DenseWeight if kind in (Kind.F16, Kind.BF16) else QuantizedWeight)
            assert torch.equal(weight.dequantize(), value), name
    assert checkpoint.description == f"gguf {kind.name}"


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_blocks_are_exact(kind: str) -> None:
    layout = BLOCK_FORMATS[kind]
    assert gguf.GGML_QUANT_SIZES[Kind[kind]] == (layout.block, layout.nbytes)
    rows = np.random.default_rng(0).integers(0, 256, (64, 3 * layout.nbytes), np.uint8)
    weight = decode_blocks(rows, kind)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, Kind[kind])
    finite = np.isfinite(expected)
    assert finite.mean() > 0.9
    assert np.array_equal(weight.dequantize().numpy()[finite], expected[finite])
    assert weight.codes.max() == 2**weight.bits - 1
    assert weight.shape == (64, 3 * layout.block)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "tiny.gguf")
    import_gguf(tmp_path / "tiny.gguf", tmp_path / "model")
    return tmp_path / "model"


def test_checks_name_the_tensor_and_both_shapes(tiny: Path) -> None:
    checkpoint = open_gguf(tiny)
    checkpoint.check_linear("model.layers.0.self_attn.k_proj", (16, 32))
    checkpoint.check_tensor("model.norm.weight", (32,))
    with pytest.raises(CheckpointError, match=r"k_proj.weight' has shape \[16, 32\], expected \[32, 32\]"):
        checkpoint.check_linear("model.layers.0.self_attn.k_proj", (32, 32))
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight' is missing"):
        checkpoint.check_linear("model.layers.1.mlp.up_proj", (32, 32))
    assert checkpoint.has("model.norm.weight")
    assert not checkpoint.has_module("lm_head")
    assert checkpoint.config["tie_word_embeddings"] is True
    tensors = gguf.GGUFReader(tiny / "tiny.gguf").tensors
    assert checkpoint.weight_bytes == sum(tensor.n_bytes for tensor in tensors)


def test_pooling_is_told_as_sentence_transformers_does(tmp_path: Path) -> None:
    """gguf names the kinds; their modes are those of sentence-transformers (1_Pooling/config.json)."""
    modes = {"MEAN": "mean", "CLS": "cls", "LAST": "lasttoken", "RANK": "rank"}
    model = tiny_model("qwen3", head_dim=16)
    for kind in gguf.PoolingType:
        folder = tmp_path / kind.name
        folder.mkdir()
        checkpoint = imported(folder, model, "qwen3", metadata={"pooling_type": int(kind)})
        file = checkpoint.path / "1_Pooling" / "config.json"
        assert file.exists() is (kind.name != "NONE")
        if kind.name != "NONE":
            assert json.loads(file.read_text()) == {"pooling_mode": modes[kind.name]}


def test_attention_that_is_not_causal_is_refused(tmp_path: Path) -> None:
    model = tiny_model("qwen3", head_dim=16)
    with pytest.raises(UnsupportedModelError, match=r"tiny\.gguf: attention that is not causal"):
        imported(tmp_path, model, "qwen3", metadata={"attention.causal": False})


def test_a_file_that_changed_after_the_import_is_refused(tiny: Path) -> None:
    file = (tiny / "tiny.gguf").resolve()
    file.write_bytes(file.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: \d+ bytes, imported with"):
        open_gguf(tiny)


@pytest.mark.parametrize("damage", ["{", "{}", '"offset":9999999', '"shape":[7]'])
def test_a_damaged_index_is_refused(tiny: Path, damage: str) -> None:
    text = (tiny / "tensors.json").read_text()
    if damage.startswith('"'):
        field = damage.split(":")[0]
        text = re.sub(rf"{field}:(\[[^]]*\]|\d+)", damage, text, count=1)
    else:
        text = damage
    (tiny / "tensors.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"tensors\.json"):
        open_gguf(tiny)
