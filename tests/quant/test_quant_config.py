import json

import pytest

from quantd.quant.config import (
    AWQConfig,
    BitsAndBytesConfig,
    CompressedTensorsConfig,
    GPTQConfig,
    read_quant_config,
)
from quantd.quant.config_gptq import GPTQSettings
from quantd.quant.errors import CheckpointError, UnsupportedModelError

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}


def read(tmp_path, embedded, **files):
    for name, value in files.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(value))
    return read_quant_config(tmp_path, {} if embedded is None else {"quantization_config": embedded})


def test_no_record_means_not_quantized(tmp_path):
    assert read(tmp_path, None) is None


def test_records_are_searched_in_order(tmp_path):
    assert read(tmp_path, GPTQ | {"bits": 2}).base.bits == 2
    assert read(tmp_path, GPTQ | {"bits": 2}, quant_config=GPTQ | {"bits": 3}).base.bits == 3
    assert read(tmp_path, GPTQ | {"bits": 2}, quantize_config=GPTQ | {"bits": 8}).base.bits == 8


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, GPTQSettings(4, 128, True, False)),
        ({"group_size": -1, "desc_act": True, "sym": False}, GPTQSettings(4, -1, False, True)),
        ({"sym": None, "desc_act": None}, GPTQSettings(4, 128, True, False)),
        ({"bits": "8", "group_size": "32"}, GPTQSettings(8, 32, True, False)),
    ],
)
def test_gptq_settings(tmp_path, changes, expected):
    assert read(tmp_path, GPTQ | changes).base == expected


@pytest.mark.parametrize(
    "record",
    [
        {"quant_method": "gptq", "w_bit": 3, "q_group_size": 64, "zero_point": True},
        {"method": "gptq", "wbits": 3, "group_size": 64, "sym": False},
        {"bits": 3, "group_size": 64, "sym": False},
    ],
)
def test_gptq_synonyms(tmp_path, record):
    assert read(tmp_path, record).base == GPTQSettings(3, 64, False, False)


@pytest.mark.parametrize(
    ("changes", "version"),
    [({}, 1), ({"checkpoint_format": "gptq"}, 1), ({"format": "gptq_v2"}, 2), ({"version": "GPTQ_V2"}, 2)],
)
def test_zero_point_label(tmp_path, changes, version):
    assert read(tmp_path, GPTQ | changes).zero_version == version


def test_static_groups_may_be_in_meta(tmp_path):
    assert read(tmp_path, GPTQ | {"static_groups": True}).static_groups
    assert read(tmp_path, GPTQ | {"meta": {"static_groups": True}}).static_groups
    assert not read(tmp_path, GPTQ).static_groups


def test_dynamic_rules_first_match_from_the_start_of_the_full_name(tmp_path):
    rules = {
        r"-:.*layers\.1\.mlp\..*": {},
        r"+:model\.layers\.0\..*q_proj$": {"group_size": 32},
        r".*q_proj": {"bits": 8},
        r"layers\.3": {"bits": 2},
        r".*k_proj": False,
    }
    config = read(tmp_path, GPTQ | {"dynamic": rules})
    settings = lambda name: config.settings(f"model.layers.{name}")  # noqa: E731
    base = config.base
    assert settings("0.self_attn.q_proj") == GPTQSettings(4, 32, True, False)
    assert settings("2.self_attn.q_proj") == GPTQSettings(8, 128, True, False)
    assert settings("1.mlp.up_proj") == settings("0.self_attn.k_proj") == base
    assert settings("3.self_attn.o_proj") == base  # no rule matches from the start of the name


@pytest.mark.parametrize(
    ("record", "description"),
    [
        (GPTQ | {"desc_act": True, "group_size": 32}, "gptq 4-bit g32 act-order"),
        (GPTQ | {"desc_act": True, "static_groups": True}, "gptq 4-bit g128"),
        (GPTQ | {"dynamic": {".*": {"bits": 8}}}, "gptq 4-bit g128 per-module rules"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "GEMM"}, "awq 4-bit g64"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes 8-bit"),
    ],
)
def test_descriptions(tmp_path, record, description):
    assert read(tmp_path, record).description == description


def test_old_files_without_a_method(tmp_path):
    assert read(tmp_path, {"load_in_8bit": True}) == BitsAndBytesConfig()
    awq = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
    assert read(tmp_path, None, quant_config=awq) == AWQConfig(4, 128)
    embedded = {"quant_method": "awq"}
    assert isinstance(read(tmp_path, embedded, quant_config={"bits": 4, "group_size": 128}), AWQConfig)


def test_auto_round_packs_as_gptq_or_awq(tmp_path):
    record = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}
    extra = {"model.a": {"bits": 8}, "lm_head": {"bits": 16}}
    config = read(tmp_path, record | {"packing_format": "auto_round:auto_gptq", "extra_config": extra})
    assert isinstance(config, GPTQConfig) and config.zero_version == 1
    assert config.settings("model.a").bits == 8
    assert config.settings("modelXa").bits == config.settings("model.ab").bits == 4
    assert read(tmp_path, record | {"packing_format": "auto_round:auto_awq"}) == AWQConfig(4, 128)


def group(**weights):
    return {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **weights}}


def compressed(*groups, **more):
    named = {f"group_{i}": row for i, row in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": named, **more}


def test_compressed_tensors_scheme(tmp_path):
    config = read(tmp_path, compressed(group(strategy="group", group_size=128, actorder="group")))
    (scheme,) = config.schemes
    assert (scheme.bits, scheme.group_size, scheme.ordered, scheme.input_bits) == (4, 128, True, None)
    assert config.description == "compressed-tensors W4A16 g128 act-order"


@pytest.mark.parametrize(
    ("actorder", "ordered"),
    [("group", True), ("dynamic", True), (True, True), ("weight", False), ("static", False), (None, False)],
)
def test_compressed_tensors_act_order_spellings(tmp_path, actorder, ordered):
    config = read(tmp_path, compressed(group(strategy="group", group_size=128, actorder=actorder)))
    assert config.schemes[0].ordered is ordered


def test_compressed_tensors_targets_go_from_names_to_patterns_to_classes(tmp_path):
    rows = [
        group(strategy="channel"),
        group(strategy="group", group_size=32) | {"targets": [r"re:.*mlp\..*"]},
        group(strategy="group", group_size=64) | {"targets": ["model.layers.0.mlp.up_proj"]},
    ]
    config = read(tmp_path, compressed(*rows))
    assert isinstance(config, CompressedTensorsConfig)
    sizes = [
        config.scheme(f"model.layers.0.{m}").group_size
        for m in ("self_attn.q", "mlp.down_proj", "mlp.up_proj")
    ]
    assert sizes == [None, 32, 64]
    assert read(tmp_path, compressed(rows[1])).scheme("lm_head") is None


@pytest.mark.parametrize(("symmetric", "bits"), [(True, 8), (False, None)])
def test_compressed_tensors_dynamic_inputs(tmp_path, symmetric, bits):
    inputs = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token", "symmetric": symmetric}
    row = group(num_bits=8, strategy="channel") | {"input_activations": inputs}
    assert read(tmp_path, compressed(row, format="int-quantized")).schemes[0].input_bits == bits


STATIC = {"num_bits": 8, "type": "int", "dynamic": False, "strategy": "tensor"}
FP8_INPUT = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}
INT4_INPUT = {"num_bits": 4, "type": "int", "dynamic": True, "strategy": "token"}

UNSUPPORTED = [
    ({"quant_method": "torchao"}, "'torchao'"),
    ({"quant_method": "fp8"}, "'fp8'"),
    ({"quant_method": "exl3"}, "'exl3'"),
    ({"quant_method": "marlin", "bits": 4, "group_size": 128}, "'marlin'"),
    (GPTQ | {"bits": 5}, "5-bit"),
    (GPTQ | {"checkpoint_format": "marlin"}, "'marlin'"),
    (GPTQ | {"is_marlin_format": True}, "'marlin'"),
    (GPTQ | {"format": "bitblas"}, "'bitblas'"),
    (GPTQ | {"format": "gptq_p", "bits": 3}, "'gptq_p'"),
    (GPTQ | {"pack_dtype": "int16"}, "pack_dtype 'int16'"),
    (GPTQ | {"rotation": "hadamard"}, "rotation 'hadamard'"),
    (GPTQ | {"dynamic": {".*": {"bits": 6}}}, "6-bit"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "'gemv'"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "marlin"}, "'marlin'"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128, "backend": "llm-awq"}, "'llm-awq'"),
    ({"quant_method": "awq", "bits": 3, "group_size": 128}, "3-bit"),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
    (
        {"quant_method": "auto-round", "bits": 4, "group_size": 8, "packing_format": "auto_round:fp8"},
        "auto_round:fp8",
    ),
    (compressed(group(type="float", num_bits=8)), "8-bit float weights"),
    (compressed(group(num_bits=6, strategy="channel")), "6-bit"),
    (compressed(group(strategy="block")), "'block'"),
    (compressed(group(strategy="channel") | {"input_activations": STATIC}), "static input scales"),
    (compressed(group(strategy="channel") | {"input_activations": FP8_INPUT}), "float per token"),
    (compressed(group(strategy="channel") | {"input_activations": INT4_INPUT}), "4-bit int per token"),
    (compressed(group(strategy="channel") | {"output_activations": STATIC}), "output activations"),
    (compressed(group(strategy="channel"), format="marlin-24"), "'marlin-24'"),
    (
        compressed(group(strategy="channel"), sparsity_config={"format": "sparse-24-bitmask"}),
        "sparse-24-bitmask",
    ),
    (
        compressed(group(strategy="channel"), transform_config={"config_groups": {"R1": {}}}),
        "transform_config",
    ),
    (compressed(["Linear"]), "preset name"),
]


@pytest.mark.parametrize(("record", "message"), UNSUPPORTED)
def test_unsupported_methods_are_refused_by_name(tmp_path, record, message):
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read(tmp_path, record)
    assert "quantization_config" in str(caught.value)


DAMAGED = [
    ("gptq", "not an object"),
    ({"quant_method": "gptq", "group_size": 128}, "missing required field `bits`"),
    ({"quant_method": "gptq", "bits": 4}, "missing required field `group_size`"),
    (GPTQ | {"bits": "four"}, "bits"),
    (GPTQ | {"group_size": 0}, "group_size 0"),
    (GPTQ | {"group_size": -2}, "group_size -2"),
    (GPTQ | {"dynamic": {"(": {}}}, "not a regular expression"),
    (GPTQ | {"dynamic": {".*": {"group_size": 0}}}, "group_size 0"),
    (GPTQ | {"dynamic": [1]}, "dynamic"),
    (compressed(), "quantizes no weights"),
    (compressed(group(strategy="group")), "group_size None"),
    (compressed(group(strategy="channel") | {"targets": ["re:("]}), "not a regular expression"),
    ({"quant_method": "compressed-tensors"}, "config_groups"),
]


@pytest.mark.parametrize(("record", "message"), DAMAGED)
def test_damaged_records_are_refused(tmp_path, record, message):
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, record)
