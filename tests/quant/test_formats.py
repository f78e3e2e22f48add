"""Every stored variant without a fixture, written by the slow packers of checkpoint_writer."""

import logging

import numpy as np
import pytest
import torch
from checkpoint_writer import gptq_tensors, pack_awq, pack_padded, pack_rows, under, write_model

from quantd.kernels.weights import DenseWeight
from quantd.quant.checkpoint import open_checkpoint
from quantd.quant.errors import CheckpointError, UnsupportedModelError

N, K = 64, 128
SHAPE = (N, K)
RNG = np.random.default_rng


def gptq_config(bits=4, group_size=32, **more):
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "sym": False,
        "desc_act": False,
    } | more


def random_gptq(bits, groups, seed=0, k=K, n=N):
    rng = RNG(seed)
    codes, zeros = rng.integers(0, 2**bits, (k, n)), rng.integers(0, 2**bits, (groups, n))
    return codes, zeros, (rng.random((groups, n)) / 16).astype(np.float16)


def values(codes, zeros, scales, g_idx):
    """float64 [N, K] by the formula."""
    return (scales.astype(np.float64)[g_idx] * (codes - zeros[g_idx])).T


def assert_decodes(folder, expected, module="m"):
    checkpoint = open_checkpoint(folder)
    assert checkpoint.has_module(module)
    checkpoint.check_linear(module, expected.shape)
    weight = checkpoint.linear(module, expected.shape)
    np.testing.assert_array_equal(weight.dequantize().double().numpy(), expected)
    return weight


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group_size", [32, -1, 48, 256])
def test_gptq_widths_groups_and_zero_points(tmp_path, bits, group_size, version):
    size = K if group_size == -1 else group_size
    g_idx = np.arange(K) // size
    parts = random_gptq(bits, g_idx[-1] + 1)
    folder = write_model(
        tmp_path,
        under("m", gptq_tensors(*parts, bits, version=version)),
        gptq_config(bits, group_size, checkpoint_format={1: "gptq", 2: "gptq_v2"}[version]),
    )
    weight = assert_decodes(folder, values(*parts, g_idx))
    assert weight.perm is None and weight.bits == bits


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_act_order_with_a_short_last_group(tmp_path, bits):
    g_idx = RNG(3).permutation(np.arange(K) // 48)
    parts = random_gptq(bits, 3)
    folder = write_model(
        tmp_path, under("m", gptq_tensors(*parts, bits, g_idx)), gptq_config(bits, 48, desc_act=True)
    )
    weight = assert_decodes(folder, values(*parts, g_idx))
    assert weight.group_size == 48 and weight.perm is not None


def test_gptq_static_groups_need_no_permutation(tmp_path):
    parts, g_idx = random_gptq(4, 4), np.arange(K) // 32
    config = gptq_config(desc_act=True, static_groups=True)
    for name, index in (("given", g_idx), ("absent", None)):
        folder = write_model(tmp_path / name, under("m", gptq_tensors(*parts, 4, index)), config)
        assert assert_decodes(folder, values(*parts, g_idx)).perm is None


def test_gptq_planar_equals_v2_at_four_bits(tmp_path):
    parts = random_gptq(4, 4)
    folder = write_model(
        tmp_path, under("m", gptq_tensors(*parts, 4, version=2)), gptq_config(format="gptq_p")
    )
    assert_decodes(folder, values(*parts, np.arange(K) // 32))


def test_gptq_lm_head_and_bfloat16_scales(tmp_path):
    parts = random_gptq(4, 4)
    pieces = gptq_tensors(*parts, 4)
    pieces["scales"] = pieces["scales"].bfloat16()
    folder = write_model(tmp_path, under("lm_head", pieces), gptq_config(lm_head=True))
    scales = pieces["scales"].double().numpy()
    expected = (scales[np.arange(K) // 32] * (parts[0] - parts[1][np.arange(K) // 32])).T
    assert_decodes(folder, expected, "lm_head")


# The layer of cases c19 and c23.
CODES = (7 * np.arange(K)[:, None] + 3 * np.arange(N)) % 16
SCALES = np.repeat(0.01 * 3.0 ** np.arange(4)[:, None], N, 1).astype(np.float32)
X = torch.tensor([((i % 11) - 5) / 5 for i in range(K)], dtype=torch.float64)


def case_layer(tmp_path, nibble, config, g_idx=None, scales=SCALES):
    """Every stored zero point is `nibble`; scales float32, so that the cases' figures come out in full."""
    zeros = np.full(scales.shape, nibble)
    pieces = gptq_tensors(CODES, zeros, scales, 4, g_idx, version=2)
    pieces["scales"] = torch.from_numpy(scales)
    return write_model(tmp_path, under("m", pieces), gptq_config(sym=True) | config)


def outputs(folder):
    y = open_checkpoint(folder).linear("m", SHAPE).dequantize().double() @ X
    return [y[0].item(), y[1].item(), y[63].item()]


@pytest.mark.parametrize(
    ("label", "nibble", "warns"),
    [("gptq", 7, False), ("gptq_v2", 8, False), ("gptq", 8, True), ("gptq_v2", 7, True)],
)
def test_case_c19_zero_points_are_read_the_right_way(tmp_path, caplog, label, nibble, warns):
    folder = case_layer(tmp_path, nibble, {"checkpoint_format": label})
    with caplog.at_level(logging.WARNING):
        assert outputs(folder) == pytest.approx([-0.632, 0.252, -0.908], abs=1e-5)
    assert [record.name for record in caplog.records] == ["quantd.quant.format_gptq"] * warns
    assert ("zero points are labelled" in caplog.text) is warns


def test_a_mislabelled_checkpoint_warns_once(tmp_path, caplog):
    checkpoint = open_checkpoint(case_layer(tmp_path, 8, {"checkpoint_format": "gptq"}))
    with caplog.at_level(logging.WARNING):
        checkpoint.linear("m", SHAPE)
        checkpoint.linear("m", SHAPE)
    assert len(caplog.records) == 1


def test_asymmetric_files_keep_their_label(tmp_path):
    """Every stored 8 under v1 is a legitimate zero of 9 where sym is false."""
    folder = case_layer(tmp_path, 8, {"checkpoint_format": "gptq", "sym": False})
    expected = values(CODES, np.full((4, N), 9), SCALES, np.arange(K) // 32)
    weight = open_checkpoint(folder).linear("m", SHAPE)
    np.testing.assert_allclose(weight.dequantize().numpy(), expected, rtol=1e-5)


def test_case_c19_v1_word_decodes_per_field(tmp_path):
    zeros = np.tile([8, 0, 15, 1, 7, 9, 14, 2], (4, N // 8))
    pieces = gptq_tensors(CODES, zeros, SCALES, 4, version=1)
    assert pieces["qzeros"][0, 0].item() == 0x1D860EF7
    folder = write_model(tmp_path, under("m", pieces), gptq_config())
    assert_decodes(folder, values(CODES, zeros, SCALES.astype(np.float16), np.arange(K) // 32))


@pytest.mark.parametrize(
    ("config", "g_idx", "groups", "expected"),
    [
        ({"desc_act": True}, (5 * np.arange(K) + 3) % 4, 4, [0.228, -0.136, 1.584]),
        ({"desc_act": False}, None, 4, [-0.632, 0.252, -0.908]),
        ({"desc_act": True, "group_size": -1}, np.zeros(K), 1, [-0.092, 0.08, -0.168]),
        ({"desc_act": True, "group_size": -1}, None, 1, [-0.092, 0.08, -0.168]),
    ],
)
def test_case_c23_groups_and_act_order(tmp_path, config, g_idx, groups, expected):
    folder = case_layer(tmp_path, 7, config, g_idx, SCALES[:groups])
    open_checkpoint(folder).check_linear("m", SHAPE)
    assert outputs(folder) == pytest.approx(expected, abs=1e-5)


def test_case_c23_act_order_without_g_idx_is_refused(tmp_path):
    checkpoint = open_checkpoint(case_layer(tmp_path, 7, {"desc_act": True}))
    with pytest.raises(CheckpointError, match=r"m\.g_idx is missing"):
        checkpoint.check_linear("m", SHAPE)


def test_an_all_zero_g_idx_is_trivial_without_act_order_and_refused_with_it(tmp_path, caplog):
    trivial = case_layer(tmp_path / "trivial", 7, {}, np.zeros(K))
    assert outputs(trivial) == pytest.approx([-0.632, 0.252, -0.908], abs=1e-5)
    assert "g_idx is all zero" in caplog.text
    with pytest.raises(CheckpointError, match="never filled in"):
        outputs(case_layer(tmp_path / "ordered", 7, {"desc_act": True}, np.zeros(K)))


@pytest.mark.parametrize("bad", [-1, 4])
def test_g_idx_outside_the_groups_is_refused(tmp_path, bad):
    g_idx = np.arange(K) // 32
    g_idx[5] = bad
    with pytest.raises(CheckpointError, match=r"m\.g_idx: expected groups 0 to 3, found"):
        outputs(case_layer(tmp_path, 7, {"desc_act": True}, g_idx))


def test_case_c21_rules_hold_per_checkpoint_module(tmp_path):
    """Group 128 by default; layer 0 q, k, v by 32; layer 1 mlp plain; layer 2 q in 8 bits."""
    rules = {
        r"-:.*layers\.1\.mlp\..*": {},
        r"+:.*layers\.0\.self_attn\.(q|k|v)_proj$": {"group_size": 32},
        r"+:.*layers\.2\.self_attn\.q_proj$": {"bits": 8},
    }
    tensors, expected = {}, {}
    for seed, (layer, part) in enumerate(
        (i, p) for i in range(3) for p in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")
    ):
        module = f"model.layers.{layer}.{part}"
        if (layer, part) == (1, "mlp.up_proj"):
            tensors[f"{module}.weight"] = torch.randn(N, K).half()
            expected[module] = tensors[f"{module}.weight"].double().numpy()
            continue
        bits = 8 if (layer, part) == (2, "self_attn.q_proj") else 4
        size = 32 if layer == 0 and part.startswith("self_attn") else 128
        parts = random_gptq(bits, K // size, seed)
        tensors |= under(module, gptq_tensors(*parts, bits))
        expected[module] = values(*parts, np.arange(K) // size)
    folder = write_model(tmp_path, tensors, gptq_config(group_size=128, dynamic=rules))
    weights = {module: assert_decodes(folder, values, module) for module, values in expected.items()}
    assert isinstance(weights["model.layers.1.mlp.up_proj"], DenseWeight)
    assert weights["model.layers.2.self_attn.q_proj"].bits == 8
    assert weights["model.layers.2.self_attn.k_proj"].bits == 4


def test_bits_that_do_not_fit_the_tensors_are_refused(tmp_path):
    folder = write_model(tmp_path, under("m", gptq_tensors(*random_gptq(4, 4), 4)), gptq_config(bits=8))
    with pytest.raises(CheckpointError, match=r"m\.qweight: expected shape \[32, 64\], found \[16, 64\]"):
        open_checkpoint(folder).check_linear("m", SHAPE)


def test_gptq_sizes_that_fill_no_words_are_refused(tmp_path):
    folder = write_model(tmp_path, under("m", gptq_tensors(*random_gptq(4, 4), 4)), gptq_config())
    with pytest.raises(UnsupportedModelError, match="m: 60 outputs of 4 bits"):
        open_checkpoint(folder).check_linear("m", (60, K))


@pytest.mark.parametrize("group_size", [32, -1])
def test_awq(tmp_path, group_size):
    size = K if group_size == -1 else group_size
    codes, zeros, scales = random_gptq(4, K // size)
    pieces = {"qweight": pack_awq(codes), "qzeros": pack_awq(zeros), "scales": torch.from_numpy(scales)}
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
    }
    folder = write_model(tmp_path, under("m", pieces), config)
    assert_decodes(folder, values(codes, zeros, scales, np.arange(K) // size))
    with pytest.raises(CheckpointError, match=r"m\.qweight: expected shape \[64, 8\]"):
        open_checkpoint(folder).check_linear("m", (N, 64))
    with pytest.raises(UnsupportedModelError, match="60 outputs"):
        open_checkpoint(folder).check_linear("m", (60, K))


def test_bitsandbytes(tmp_path):
    weight = torch.from_numpy(RNG(1).integers(-127, 128, SHAPE)).to(torch.int8)
    absmax = torch.from_numpy(RNG(2).random(N)).float()
    pieces = {"weight": weight, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    plain = {"lm_head.weight": torch.ones(2, 3)}
    checkpoint = open_checkpoint(write_model(tmp_path / "good", under("m", pieces) | plain, config))
    loaded = checkpoint.linear("m", SHAPE)
    expected = weight.double() * absmax.double()[:, None] / 127
    assert loaded.bits == 8 and loaded.input_bits is None
    torch.testing.assert_close(loaded.dequantize().double(), expected, rtol=0, atol=2e-7)
    assert isinstance(checkpoint.linear("lm_head", (2, 3)), DenseWeight)

    columns = pieces | {"weight_format": torch.tensor(1, dtype=torch.uint8)}
    with pytest.raises(UnsupportedModelError, match="row-major"):
        open_checkpoint(write_model(tmp_path / "columns", under("m", columns), config)).linear("m", SHAPE)
    del pieces["SCB"]
    with pytest.raises(CheckpointError, match=r"m\.SCB is missing"):
        open_checkpoint(write_model(tmp_path / "bare", under("m", pieces), config)).check_linear("m", SHAPE)


def compressed(layout, **weights):
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


def random_signed(bits, groups, seed=0, k=K):
    """codes [N, K], scales and zero points [N, G], signed."""
    rng, half = RNG(seed), 2 ** (bits - 1)
    codes, zeros = rng.integers(-half, half, (N, k)), rng.integers(-half, half, (N, groups))
    return codes, (rng.random((N, groups)) / 16).astype(np.float16), zeros


def packed(codes, scales, zeros=None, bits=4, pack=pack_rows):
    half = 2 ** (bits - 1)
    pieces = {
        "weight_packed": pack(codes + half, bits),
        "weight_scale": torch.from_numpy(scales),
        "weight_shape": torch.tensor(codes.shape),
    }
    if zeros is not None:
        pieces["weight_zero_point"] = pack(zeros.T + half, bits).t().contiguous()
    return pieces


@pytest.mark.parametrize("pack", [pack_rows, pack_padded])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("bits", "group_size"), [(4, 32), (4, 48), (4, None), (8, 64), (8, None), (3, 32), (2, 32)]
)
def test_compressed_tensors_packed(tmp_path, bits, group_size, symmetric, pack):
    size = group_size or K
    groups = -(-K // size)
    codes, scales, zeros = random_signed(bits, groups)
    g_idx = np.arange(K) // size
    shifted = codes - (0 if symmetric else zeros[:, g_idx])
    strategy = (
        {"strategy": "group", "group_size": group_size}
        if group_size
        else {"strategy": "channel", "group_size": None}
    )
    folder = write_model(
        tmp_path,
        under("m", packed(codes, scales, None if symmetric else zeros, bits, pack)),
        compressed("pack-quantized", num_bits=bits, symmetric=symmetric, **strategy),
    )
    weight = assert_decodes(folder, scales.astype(np.float64)[:, g_idx] * shifted)
    assert (weight.bits, weight.input_bits) == (bits, None)


def test_compressed_tensors_act_order(tmp_path):
    codes, scales, _ = random_signed(4, 4)
    g_idx = RNG(5).permutation(np.arange(K) // 32)
    config = compressed("pack-quantized", actorder="group")
    pieces = packed(codes, scales)
    with pytest.raises(CheckpointError, match=r"m\.weight_g_idx is missing"):
        open_checkpoint(write_model(tmp_path / "bare", under("m", pieces), config)).check_linear("m", SHAPE)
    pieces["weight_g_idx"] = torch.from_numpy(g_idx).int()
    folder = write_model(tmp_path / "whole", under("m", pieces), config)
    weight = assert_decodes(folder, scales.astype(np.float64)[:, g_idx] * codes)
    assert weight.perm is not None and weight.group_size == 32


@pytest.mark.parametrize(("strategy", "scales"), [("channel", (N, 1)), ("tensor", (1,)), ("group", (N, 4))])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_bytes(tmp_path, strategy, scales, symmetric):
    """W8A16: "int-quantized" without input activations."""
    rng = RNG(4)
    codes, zeros = rng.integers(-128, 128, SHAPE), rng.integers(-128, 128, scales)
    scale = (rng.random(scales) / 16).astype(np.float16)
    pieces = {"weight": torch.from_numpy(codes).to(torch.int8), "weight_scale": torch.from_numpy(scale)}
    if not symmetric:
        pieces["weight_zero_point"] = torch.from_numpy(zeros).to(torch.int8)
    config = compressed("int-quantized", num_bits=8, strategy=strategy, symmetric=symmetric)
    folder = write_model(tmp_path, under("m", pieces), config)
    spread = (lambda a: np.repeat(a, 32, 1)) if strategy == "group" else (lambda a: a)
    shifted = codes - (0 if symmetric else spread(zeros))
    assert_decodes(folder, spread(scale).astype(np.float64) * shifted)


def test_compressed_tensors_refusals(tmp_path):
    codes, scales, _ = random_signed(4, 4)
    good = packed(codes, scales)
    config = compressed("pack-quantized")

    def opened(name, pieces, config=config):
        return open_checkpoint(write_model(tmp_path / name, under("m", pieces), config))

    with pytest.raises(CheckpointError, match=r"m\.weight_zero_point is missing"):
        opened("asym", good, compressed("pack-quantized", symmetric=False)).check_linear("m", SHAPE)
    with pytest.raises(CheckpointError, match=r"m\.weight_shape: expected \[64, 128\], found \[64, 127\]"):
        opened("shape", good | {"weight_shape": torch.tensor([64, 127])}).linear("m", SHAPE)
    with pytest.raises(CheckpointError, match=r"m\.weight_scale: expected shape \[64, 4\], found \[64, 2\]"):
        opened("scale", good | {"weight_scale": torch.ones(N, 2)}).check_linear("m", SHAPE)
    wide = {"weight": torch.full(SHAPE, 8, dtype=torch.int8), "weight_scale": torch.ones(N, 4)}
    with pytest.raises(CheckpointError, match=r"m\.weight: expected -8 to 7, found 8 to 8"):
        opened("wide", wide, compressed("int-quantized")).linear("m", SHAPE)
    few = packed(*random_signed(3, 1, k=64)[:2], bits=3)
    few |= {"weight_packed": torch.zeros(N, 2, dtype=torch.int32)}
    with pytest.raises(UnsupportedModelError, match="m: 20 inputs of 3 bits are too few"):
        opened("few", few, compressed("pack-quantized", num_bits=3)).check_linear("m", (N, 20))
    elsewhere = compressed("pack-quantized")
    elsewhere["config_groups"]["group_0"]["targets"] = ["other"]
    with pytest.raises(CheckpointError, match="no config group"):
        opened("elsewhere", good, elsewhere).check_linear("m", SHAPE)
