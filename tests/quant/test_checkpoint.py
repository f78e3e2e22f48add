"""Checkpoints that other tools wrote, decoded one code at a time and run against their expected logits."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_writer import decode_gptq, under, write_model
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from quantd.kernels.weights import DenseWeight, QuantizedWeight
from quantd.quant.checkpoint import open_checkpoint
from quantd.quant.errors import CheckpointError, UnsupportedModelError

FIXTURES = Path(__file__).parents[1] / "data" / "fixtures"

# name: (bits, zero-point convention, description)
GPTQ = {
    "autogptq-3b-g32-sym": (3, 1, "gptq 3-bit g32"),
    "autogptq-4b-g32-sym": (4, 1, "gptq 4-bit g32"),
    "autogptq-4b-g32-sym-desc": (4, 1, "gptq 4-bit g32 act-order"),
    "autogptq-8b-gm1-asym": (8, 1, "gptq 8-bit g-1"),
    "gptqmodel-4b-g32-v2": (4, 2, "gptq 4-bit g32"),
}
W8A8 = "ct-w8a8-dynamic"

SHAPES = {
    "self_attn.q_proj": (128, 128),
    "self_attn.k_proj": (64, 128),
    "self_attn.v_proj": (64, 128),
    "self_attn.o_proj": (128, 128),
    "mlp.gate_proj": (256, 128),
    "mlp.up_proj": (256, 128),
    "mlp.down_proj": (128, 256),
}
LINEARS = {f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in SHAPES.items()}


def raw_tensors(name):
    (file,) = (
        path for path in (FIXTURES / name).glob("*.safetensors") if path.name != "expected.safetensors"
    )
    return load_file(file)


@pytest.mark.parametrize("name", GPTQ)
def test_gptq_fixtures_decode_as_the_format_says(name):
    bits, version, description = GPTQ[name]
    checkpoint, raw = open_checkpoint(FIXTURES / name), raw_tensors(name)
    assert checkpoint.description == description
    for module in (f"model.layers.1.{part}" for part in ("self_attn.k_proj", "mlp.down_proj")):
        checkpoint.check_linear(module, LINEARS[module])
        weight = checkpoint.linear(module, LINEARS[module])
        assert isinstance(weight, QuantizedWeight)
        assert (weight.bits, weight.input_bits) == (bits, None)
        assert (weight.perm is not None) == name.endswith("desc")
        pieces = {key: raw[f"{module}.{key}"] for key in ("qweight", "qzeros", "scales", "g_idx")}
        expected = decode_gptq(pieces, bits, version)
        np.testing.assert_array_equal(weight.dequantize().double().numpy(), expected)


def test_compressed_tensors_fixture_decodes_as_the_format_says():
    checkpoint, raw = open_checkpoint(FIXTURES / W8A8), raw_tensors(W8A8)
    assert checkpoint.description == "compressed-tensors W8A8 per channel"
    for module, shape in LINEARS.items():
        weight = checkpoint.linear(module, shape)
        assert isinstance(weight, QuantizedWeight)
        assert (weight.bits, weight.input_bits, weight.group_size) == (8, 8, shape[1])
        expected = raw[f"{module}.weight"].double() * raw[f"{module}.weight_scale"].double()
        assert torch.equal(weight.dequantize().double(), expected)


def round_inputs(module, args):
    """Symmetric INT8 per token as compressed-tensors has it: the codes -128 to 127 span 2 * absmax."""
    (x,) = args
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (torch.round(x / scale).clamp(-128, 127) * scale,)


@pytest.mark.parametrize("name", [*GPTQ, W8A8])
def test_fixtures_reach_the_logits_of_their_writers(name):
    checkpoint = open_checkpoint(FIXTURES / name)
    config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
    model = LlamaForCausalLM(LlamaConfig(**config)).float().eval()
    state = {}
    for key, value in model.state_dict().items():
        module = key.removesuffix(".weight")
        if module in LINEARS:
            weight = checkpoint.linear(module, LINEARS[module])
            state[key] = weight.dequantize()
            if getattr(weight, "input_bits", None):
                model.get_submodule(module).register_forward_pre_hook(round_inputs)
        else:
            state[key] = checkpoint.tensor(key, tuple(value.shape))
    model.load_state_dict(state)
    expected = load_file(FIXTURES / name / "expected.safetensors")
    with torch.no_grad():
        logits = model(expected["input_ids"]).logits
    error = (logits - expected["logits"]).norm() / expected["logits"].norm()
    # The last bit of a sum decides to which step an input is rounded, so W8A8 logits move more.
    assert error < (2e-3 if name in GPTQ else 1e-2), error


def test_names_sizes_and_plain_tensors():
    checkpoint, raw = open_checkpoint(FIXTURES / "gptqmodel-4b-g32-v2"), raw_tensors("gptqmodel-4b-g32-v2")
    assert sorted(checkpoint.names()) == sorted(raw)
    assert checkpoint.weight_bytes == sum(t.numel() * t.element_size() for t in raw.values())
    assert checkpoint.config["hidden_size"] == 128
    assert checkpoint.has("model.norm.weight") and not checkpoint.has("model.norm")
    assert checkpoint.has_module("lm_head") and checkpoint.has_module("model.layers.0.mlp.up_proj")
    assert not checkpoint.has_module("model.layers.2.mlp.up_proj")
    norm = checkpoint.tensor("model.norm.weight", (128,))
    assert norm.dtype == torch.float32 and torch.equal(norm, raw["model.norm.weight"].float())
    head = checkpoint.linear("lm_head", (512, 128))
    assert isinstance(head, DenseWeight) and torch.equal(head.values, raw["lm_head.weight"])


def test_biases_of_quantized_modules_are_ordinary_tensors():
    checkpoint = open_checkpoint(FIXTURES / "autogptq-4b-g32-sym")
    assert torch.equal(checkpoint.tensor("model.layers.0.mlp.up_proj.bias", (256,)), torch.zeros(256))


@pytest.fixture
def copy(tmp_path):
    def make(name):
        return Path(shutil.copytree(FIXTURES / name, tmp_path / name))

    return make


@pytest.mark.parametrize("piece", ["qweight", "qzeros", "scales"])
def test_a_missing_piece_is_named_without_reading_weights(copy, piece):
    folder = copy("autogptq-4b-g32-sym")
    tensors = raw_tensors(folder.name)
    del tensors[f"model.layers.0.mlp.up_proj.{piece}"]
    save_file(tensors, folder / "gptq_model-4bit-32g.safetensors")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=rf"mlp\.up_proj\.(weight|{piece}) is missing"):
        checkpoint.check_linear("model.layers.0.mlp.up_proj", (256, 128))


def test_a_truncated_file_is_refused_on_opening(copy):
    folder = copy("autogptq-4b-g32-sym")
    file = folder / "gptq_model-4bit-32g.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        open_checkpoint(folder)


def test_a_file_cut_after_opening_is_an_error_not_a_crash(copy):
    folder = copy(W8A8)
    checkpoint = open_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"mlp\.up_proj\.weight.* cannot be read"):
        checkpoint.linear("model.layers.0.mlp.up_proj", (256, 128))


@pytest.mark.parametrize("name", [*GPTQ, W8A8])
@pytest.mark.parametrize("shape", [(256, 64), (288, 128)])
def test_a_wrong_shape_is_refused_with_both_shapes(name, shape):
    checkpoint = open_checkpoint(FIXTURES / name)
    with pytest.raises(CheckpointError, match=r"up_proj\.\w+: expected shape \[.*found \["):
        checkpoint.check_linear("model.layers.0.mlp.up_proj", shape)
    with pytest.raises(CheckpointError, match="expected shape"):
        checkpoint.linear("model.layers.0.mlp.up_proj", shape)


def test_missing_or_misshapen_plain_tensors_are_named():
    checkpoint = open_checkpoint(FIXTURES / W8A8)
    with pytest.raises(CheckpointError, match=r"model\.nothing is missing: expected \[3\]"):
        checkpoint.check_tensor("model.nothing", (3,))
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: expected shape \[3\], found \[128\]"):
        checkpoint.tensor("model.norm.weight", (3,))
    with pytest.raises(CheckpointError, match="expected dtype F16 or BF16 or F32, found I8"):
        checkpoint.check_tensor("model.layers.0.mlp.up_proj.weight", (256, 128))
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.mlp\.up_proj\.weight is missing"):
        checkpoint.check_linear("model.layers.9.mlp.up_proj", (256, 128))


def test_quantized_tensors_without_a_record_are_refused(copy):
    folder = copy("autogptq-4b-g32-sym")
    (folder / "quantize_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="says nothing of its quantization"):
        open_checkpoint(folder).check_linear("model.layers.0.mlp.up_proj", (256, 128))


def test_unknown_methods_are_refused_on_opening(tmp_path):
    write_model(tmp_path, {"a.weight": torch.ones(2, 2)}, {"quant_method": "exl3"})
    with pytest.raises(UnsupportedModelError, match="'exl3'"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("dtype", "description"), [(torch.float16, "fp16"), (torch.bfloat16, "bf16"), (torch.float32, "fp32")]
)
def test_dense_models_keep_their_values(tmp_path, dtype, description):
    values = torch.randn(6, 5).to(dtype)
    checkpoint = open_checkpoint(write_model(tmp_path, {"a.weight": values, "norm.weight": torch.ones(5)}))
    assert checkpoint.description == description
    weight = checkpoint.linear("a", (6, 5))
    assert isinstance(weight, DenseWeight) and torch.equal(weight.values, values)


def test_dense_weights_of_other_types_are_refused(tmp_path):
    tensors = {
        "a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn),
        "b.weight": torch.ones(2, 2, dtype=torch.int8),
    }
    checkpoint = open_checkpoint(write_model(tmp_path, tensors))
    for module, dtype in (("a", "F8_E4M3"), ("b", "I8")):
        with pytest.raises(CheckpointError, match=rf"{module}\.weight: expected dtype .*, found {dtype}"):
            checkpoint.check_linear(module, (2, 2))


def test_a_sharded_model_reads_from_every_shard(tmp_path):
    raw = raw_tensors("autogptq-4b-g32-sym-desc")
    names = sorted(raw)
    shards = {f"model-0000{i + 1}-of-00003.safetensors": names[i::3] for i in range(3)}  # splits every module
    for file, part in shards.items():
        save_file({name: raw[name] for name in part}, tmp_path / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    shutil.copy(FIXTURES / "autogptq-4b-g32-sym-desc" / "config.json", tmp_path)
    whole, sharded = open_checkpoint(FIXTURES / "autogptq-4b-g32-sym-desc"), open_checkpoint(tmp_path)
    assert sharded.weight_bytes == whole.weight_bytes
    for module, shape in LINEARS.items():
        assert torch.equal(
            sharded.linear(module, shape).dequantize(), whole.linear(module, shape).dequantize()
        )


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such folder"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        open_checkpoint(tmp_path)


def test_several_ggufs_are_refused_by_name(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(a\.gguf, b\.gguf\)"):
        open_checkpoint(tmp_path)


def test_a_module_with_both_kinds_of_weight_is_the_quantized_one(copy):
    folder = copy("autogptq-4b-g32-sym")
    module = "model.layers.0.mlp.up_proj"
    tensors = raw_tensors(folder.name) | under(module, {"weight": torch.ones(256, 128)})
    save_file(tensors, folder / "gptq_model-4bit-32g.safetensors")
    assert isinstance(open_checkpoint(folder).linear(module, (256, 128)), QuantizedWeight)
