"""Activations rounded to INT8, bit by bit as the reference rounds them, and the products that take them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_weights import exact, quantized, relative_error

from quantd.kernels.gpu.int8 import quantize_rows
from quantd.kernels.gpu.linear import linear, linear_rounded
from quantd.kernels.gpu.norm import rms_norm_rounded
from quantd.kernels.gpu.tuning import Tuning, gpu_of
from quantd.kernels.gpu.weights import Kind, pack
from quantd.kernels.reference import rounded_inputs
from quantd.kernels.weights import QuantizedWeight
from quantd.quant.checkpoint import open_checkpoint


@pytest.fixture(autouse=True)
def seed(poisoned_outputs: None) -> None:
    torch.manual_seed(0)


@pytest.fixture
def tuning(gpu_device: str) -> Tuning:
    return Tuning(gpu_of(torch.device(gpu_device)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 75, 1024, 2500])
def test_rows_are_rounded_as_by_the_reference(dtype: torch.dtype, k: int, gpu_device: str) -> None:
    x = (torch.randn(5, k) * torch.logspace(-2, 2, 5)[:, None]).to(dtype)
    x[1, k // 2], x[2] = -50.0, 0.0  # the code -128 where -127.5 is half to even, and a row of nothing
    rounded = quantize_rows(x.to(gpu_device))
    assert rounded.codes.dtype == torch.int8 and rounded.scale.shape == (5,)
    values = rounded.codes.cpu().float() * rounded.scale.cpu().unsqueeze(1)
    assert torch.equal(values, rounded_inputs(x))
    assert rounded.codes[1].min() == -128


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_no_scale(bad: float, gpu_device: str) -> None:
    x = torch.randn(3, 40)
    x[1, 39] = bad
    rounded = quantize_rows(x.to(gpu_device))
    assert rounded.scale[1].isnan() and rounded.scale[::2].isfinite().all()


def test_no_rows(gpu_device: str) -> None:
    assert quantize_rows(torch.empty(0, 64, device=gpu_device)).codes.shape == (0, 64)


@pytest.mark.parametrize(("bits", "group_size", "k"), [(8, 256, 256), (8, 75, 75), (4, 64, 128), (4, 16, 48)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_products_of_codes(
    bits: int, group_size: int, k: int, symmetric: bool, tuning: Tuning, gpu_device: str
) -> None:
    weight = quantized(37, k, bits, group_size, symmetric=symmetric, perm=k == 128, input_bits=8)
    x, bias = torch.randn(17, k), torch.randn(37)
    on_gpu = pack(weight, bias, gpu_device, torch.float32)
    assert on_gpu.kind is Kind.INT8
    out = linear(x.to(gpu_device), on_gpu, tuning)
    assert relative_error(out, exact(x, weight, bias)) < 1e-6
    assert torch.equal(linear(x[:1].to(gpu_device), on_gpu, tuning), out[:1])


def test_largest_products_do_not_saturate(tuning: Tuning, gpu_device: str) -> None:
    codes = torch.zeros(16, 128, dtype=torch.uint8)  # -128 once centred
    weight = QuantizedWeight(codes, torch.ones(16, 1), torch.full((16, 1), -128.0), 8, 128, input_bits=8)
    x = torch.full((1, 128), -1.0)
    out = linear(x.to(gpu_device), pack(weight, None, gpu_device, torch.float32), tuning)
    assert relative_error(out, exact(x, weight)) < 1e-6


def test_a_norm_may_have_rounded_them(tuning: Tuning, gpu_device: str) -> None:
    weight = pack(quantized(20, 64, 8, 64, input_bits=8), None, gpu_device, torch.float16)
    x = torch.randn(3, 64, device=gpu_device)
    normed, rounded = rms_norm_rounded(x, torch.rand(64, device=gpu_device), 1e-6, torch.float16)
    out = linear_rounded(rounded, weight, torch.float16, tuning)
    assert torch.equal(out, linear(normed, weight, tuning))


def test_a_checkpoint_of_compressed_tensors(
    fixture_folders: dict[str, Path], tuning: Tuning, gpu_device: str
) -> None:
    checkpoint = open_checkpoint(fixture_folders["ct-w8a8-dynamic"])
    weight = checkpoint.linear("model.layers.0.mlp.down_proj", (128, 256))
    x = torch.randn(2, 256)
    on_gpu = pack(weight, None, gpu_device, torch.float32)
    assert on_gpu.kind is Kind.INT8 and on_gpu.offset is None
    assert relative_error(linear(x.to(gpu_device), on_gpu, tuning), exact(x, weight)) < 1e-6
