"""RMSNorm kernels against the reference, on widths of every kind, and bit by bit between batches."""

from __future__ import annotations

import pytest
import torch

from quantd.kernels.gpu import norm
from quantd.kernels.reference import ReferenceOps, rounded_inputs

REFERENCE = ReferenceOps()
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Half a step of the output's type.
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
WIDTHS = (1, 33, 64, 576, 1000, 4097, norm.MAX_WIDTH)


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return DTYPES[request.param]


@pytest.fixture(autouse=True)
def seed(poisoned_outputs: None) -> None:
    torch.manual_seed(0)


def assert_near(ours: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(ours.float(), expected, rtol=TOLERANCE[ours.dtype] * 1.01, atol=1e-6)


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(gpu_device: str, dtype: torch.dtype, width: int) -> None:
    x, weight = torch.randn(3, width) * 3, torch.randn(width)
    x[1] = 0
    ours = norm.rms_norm(x.to(gpu_device), weight.to(gpu_device), 1e-5, dtype).cpu()
    assert ours.dtype == dtype
    assert_near(ours, REFERENCE.rms_norm(x, weight, 1e-5))


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm(gpu_device: str, dtype: torch.dtype, width: int) -> None:
    x, residual, weight = torch.randn(3, width).to(dtype), torch.randn(3, width), torch.randn(width)
    inputs = [tensor.to(gpu_device) for tensor in (x, residual, weight)]
    normed, total = (out.cpu() for out in norm.add_rms_norm(*inputs, 1e-6, 0.22, dtype))
    expected, expected_total = REFERENCE.add_rms_norm(x, residual, weight, 1e-6, 0.22)
    torch.testing.assert_close(total, expected_total, rtol=1e-6, atol=1e-6)
    assert_near(normed, expected)


@pytest.mark.parametrize("width", [33, 576, 4096])
def test_rounding_is_that_of_w8a8_layers(gpu_device: str, dtype: torch.dtype, width: int) -> None:
    x, residual, weight = torch.randn(4, width).to(dtype), torch.randn(4, width), torch.randn(width)
    x[2], residual[2] = 0, 0
    inputs = [tensor.to(gpu_device) for tensor in (x, residual, weight)]
    normed, total, rounded = norm.add_rms_norm_rounded(*inputs, 1e-6, 1.0, dtype)
    plain = norm.add_rms_norm(*inputs, 1e-6, 1.0, dtype)
    assert torch.equal(normed, plain[0]) and torch.equal(total, plain[1])
    assert rounded.codes.dtype == torch.int8
    values = rounded.codes.cpu().float() * rounded.scale.cpu().unsqueeze(1)
    assert torch.equal(values, rounded_inputs(normed.cpu()))
    alone, codes = norm.rms_norm_rounded(total, inputs[2], 1e-6, dtype)
    # Another kernel to the compiler, which may add in another order.
    assert_near(alone.cpu(), normed.cpu().float())
    assert (codes.codes.int() - rounded.codes.int()).abs().max() <= 1


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # numpy's, in the interpreter
@pytest.mark.parametrize("fault", [torch.nan, torch.inf])
def test_rounding_does_not_hide_what_is_not_finite(gpu_device: str, fault: float) -> None:
    x, weight = torch.randn(3, 100), torch.ones(100)
    x[1, 7] = fault
    _, rounded = norm.rms_norm_rounded(x.to(gpu_device), weight.to(gpu_device), 1e-6, torch.float16)
    assert rounded.scale.isnan().tolist() == [False, True, False]


def test_a_row_does_not_depend_on_its_company(gpu_device: str) -> None:
    x, residual = (torch.randn(9, 1000, device=gpu_device) for _ in range(2))
    weight = torch.randn(1000, device=gpu_device)
    whole = norm.add_rms_norm(x, residual, weight, 1e-6, 1.0, torch.float16)
    for i in range(9):
        alone = norm.add_rms_norm(x[i : i + 1], residual[i : i + 1], weight, 1e-6, 1.0, torch.float16)
        assert torch.equal(alone[0][0], whole[0][i]) and torch.equal(alone[1][0], whole[1][i])


def test_no_rows(gpu_device: str) -> None:
    x, weight = torch.empty(0, 64, device=gpu_device), torch.ones(64, device=gpu_device)
    assert norm.rms_norm(x, weight, 1e-6, torch.float16).shape == (0, 64)
