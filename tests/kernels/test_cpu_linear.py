"""Packed weights and the linear op against the reference: every layout, odd shapes, extremes, other rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cpu_cases import VARIANTS, cpu_ops, quantized, randint, round_inputs
from torch import Tensor

from quantd.kernels.cpu.build import Variant
from quantd.kernels.cpu.weights import PackedMatrix
from quantd.kernels.reference import ReferenceOps
from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight

EXACT = ReferenceOps("fp32")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def check(weight: Weight, m: int, rounded: bool) -> None:
    """fp32 activations give the reference's result; auto gives it for inputs rounded per 32."""
    x, bias = torch.randn(m, weight.shape[1]), torch.randn(weight.shape[0])
    expected = EXACT.linear(x, EXACT.pack(weight, bias))
    ops = cpu_ops("fp32")
    assert relative_error(ops.linear(x, ops.pack(weight, bias)), expected) < 1e-6
    ops = cpu_ops("auto")
    expected = EXACT.linear(round_inputs(x) if rounded else x, EXACT.pack(weight, bias))
    assert relative_error(ops.linear(x, ops.pack(weight, bias)), expected) < 2e-6


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("scales", ["half", "half zero", "float", "float zero"])
@pytest.mark.parametrize(("group_size", "k"), [(32, 96), (32, 75), (64, 200), (16, 75), (75, 75), (128, 300)])
def test_every_layout(bits: int, scales: str, group_size: int, k: int) -> None:
    for n, m in [(16, 1), (37, 3)]:
        check(quantized(n, k, bits, group_size, scales), m, rounded=True)


@pytest.mark.parametrize("m", [1, 2, 3, 7, 8, 9, 16, 127, 128, 129, 260])
def test_any_number_of_rows(m: int) -> None:
    check(quantized(37, 75, 4, 32), m, rounded=True)


def test_inputs_longer_than_a_tile() -> None:
    check(quantized(17, 5000, 4, 64), 5, rounded=True)
    check(quantized(17, 5000, 8, 16), 5, rounded=True)


@pytest.mark.parametrize("bits", [1, 5, 6, 7])
def test_bits_between_the_packed_ones(bits: int) -> None:
    check(quantized(19, 70, bits, 32, "half zero"), 2, rounded=True)


@pytest.mark.parametrize("group_size", [1, 7, 24, 48])
def test_odd_group_sizes_are_exact(group_size: int) -> None:
    check(quantized(19, 70, 4, group_size), 3, rounded=False)


def test_permuted_inputs() -> None:
    weight = quantized(37, 75, 4, 32, perm=True)
    assert weight.perm is not None
    x = torch.randn(3, 75)
    expected = EXACT.linear(round_inputs(x[:, weight.perm]), EXACT.pack(weight_without_order(weight)))
    ops = cpu_ops("auto")
    assert relative_error(ops.linear(x, ops.pack(weight)), expected) < 2e-6
    exact = cpu_ops("fp32")
    assert relative_error(exact.linear(x, exact.pack(weight)), EXACT.linear(x, EXACT.pack(weight))) < 1e-6


def weight_without_order(weight: QuantizedWeight) -> QuantizedWeight:
    return QuantizedWeight(weight.codes, weight.scale, weight.offset, weight.bits, weight.group_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_weights(dtype: torch.dtype) -> None:
    for n, k, m in [(16, 32, 1), (33, 70, 6), (5, 2100, 3)]:
        check(DenseWeight(torch.randn(n, k).to(dtype)), m, rounded=False)


@pytest.mark.parametrize("activations", ["auto", "fp32"])
@pytest.mark.parametrize("weight", ["codes", "fp16", "group 16"])
def test_a_row_does_not_depend_on_its_company(activations: str, weight: str) -> None:
    ops = cpu_ops("auto" if activations == "auto" else "fp32")
    matrix: Weight = quantized(50, 100, 4, 16 if weight == "group 16" else 32)
    if weight == "fp16":
        matrix = DenseWeight(torch.randn(50, 100).half())
    packed, x = ops.pack(matrix), torch.randn(140, 100)
    alone = torch.cat([ops.linear(row, packed) for row in x.split(1)])
    for m in (2, 3, 5, 8, 11, 33, 64, 129, 140):
        assert torch.equal(ops.linear(x[:m], packed), alone[:m]), m
        assert torch.equal(ops.linear(x[-m:], packed), alone[-m:]), m


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("bits", "perm"), [(8, False), (4, True)])
def test_inputs_are_rounded_per_token_where_the_checkpoint_asks(
    variant: Variant, bits: int, perm: bool
) -> None:
    weight = replace(quantized(37, 75, bits, 75, "half zero", perm), input_bits=8)
    reference, ops = ReferenceOps(), cpu_ops("auto", variant)
    x = torch.randn(9, 75) * torch.logspace(-3, 3, 9)[:, None]
    x[1, 7], x[2] = -50.0, 0.0  # the code -128 (half to even), and a row without a largest input
    expected, actual = reference.linear(x, reference.pack(weight)), ops.linear(x, ops.pack(weight))
    for row, wanted in zip(actual, expected, strict=True):
        assert torch.equal(row, wanted) or relative_error(row, wanted) < 2e-6
    x[3, 5], x[4, 6] = torch.inf, torch.nan
    spoilt = ops.linear(x, ops.pack(weight))
    assert spoilt[3:5].isnan().all()
    assert torch.equal(spoilt[5:], actual[5:]) and torch.equal(spoilt[:3], actual[:3])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 5])
def test_the_largest_products_do_not_saturate(variant: Variant, bits: int, m: int) -> None:
    largest = 2**bits - 1
    codes = torch.full((16, 64), largest, dtype=torch.uint8)
    weight = QuantizedWeight(codes, torch.ones(16, 2), torch.zeros(16, 2), bits, 32)
    ops = cpu_ops("auto", variant)
    for sign in (1.0, -1.0):
        x = torch.full((m, 64), 127.0 * sign)
        expected = torch.full((m, 16), 64 * 127 * largest * sign)
        assert torch.equal(ops.linear(x, ops.pack(weight)), expected)


@pytest.mark.parametrize("m", [1, 4])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so_in_its_row(m: int, bad: float) -> None:
    ops, weight = cpu_ops("auto"), quantized(20, 64, 4, 32)
    x = torch.randn(m, 64)
    x[0, 40] = bad
    out = ops.linear(x, ops.pack(weight))
    assert not torch.isfinite(out[0]).any()
    assert torch.isfinite(out[1:]).all()


def test_zero_and_tiny_inputs_give_the_bias() -> None:
    ops, bias = cpu_ops("auto"), torch.randn(20)
    packed = ops.pack(quantized(20, 64, 4, 32), bias)
    for value in (0.0, 1e-38, 1e-45):
        assert torch.equal(ops.linear(torch.full((1, 64), value), packed)[0], bias)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("perm", [False, True])
def test_inputs_of_logits_are_rounded_finely(variant: Variant, perm: bool) -> None:
    weight, ops = quantized(37, 75, 4, 32, perm=perm), cpu_ops("auto", variant)
    packed, x = ops.pack(weight, torch.randn(37)), torch.randn(140, 75)
    expected = EXACT.linear(x, EXACT.pack(weight)) + packed.bias
    actual = ops.logits(x, packed)
    assert relative_error(actual, expected) < 3e-5 < relative_error(ops.linear(x, packed), expected)
    for m in (1, 2, 5, 63, 64, 65, 140):
        assert torch.equal(ops.logits(x[:m], packed), actual[:m]), m


def test_logits_are_scaled_and_capped() -> None:
    weight, x = quantized(37, 75, 4, 32), torch.randn(3, 75)
    ops = cpu_ops("fp32")
    for scale, softcap in [(0.3, 0.0), (1.0, 5.0), (2.0, 20.0)]:
        expected = EXACT.logits(x, EXACT.pack(weight), scale, softcap)
        assert relative_error(ops.logits(x, ops.pack(weight), scale, softcap), expected) < 1e-6


@pytest.mark.parametrize("perm", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_embedding_rows_are_the_weights(bits: int, perm: bool) -> None:
    weight, ops = quantized(37, 75, bits, 16, perm=perm), cpu_ops()
    ids = torch.tensor([36, 0, 17, 17], dtype=torch.int32)
    assert torch.equal(ops.embedding(ids, ops.pack(weight)), weight.dequantize()[ids])


def test_headers_are_as_small_as_they_can_be() -> None:
    def nbytes(scales: str) -> int:
        return packed(quantized(16, 32, 4, 32, scales)).nbytes - 16 * 32 // 2

    sizes = [nbytes(scales) for scales in ("half zero", "half", "float zero", "float")]
    assert sizes == [48, 64, 80, 128]


def packed(weight: Weight) -> PackedMatrix:
    return cpu_ops().pack(weight)


def test_size_and_memory_of_a_packed_weight() -> None:
    matrix = packed(quantized(37, 75, 3, 75, "half zero", perm=True))
    assert matrix.shape == (37, 75)
    assert matrix.nbytes == 3 * 3 * 16 * 32 * 3 // 8 + 3 * 48 + 75 * 4


def test_input_views_need_not_be_contiguous() -> None:
    ops, weight = cpu_ops("fp32"), quantized(20, 64, 4, 32)
    x = torch.randn(64, 5).T
    assert relative_error(ops.linear(x, ops.pack(weight)), EXACT.linear(x, EXACT.pack(weight))) < 1e-6


def test_codes_may_be_a_view() -> None:
    codes = randint(16, 64, 20).T
    weight = QuantizedWeight(codes, torch.rand(20, 2), torch.rand(20, 2), 4, 32)
    ops, ids = cpu_ops(), torch.arange(20, dtype=torch.int32)
    assert torch.equal(ops.embedding(ids, ops.pack(weight)), weight.dequantize())
