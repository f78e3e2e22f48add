"""The gate of an MLP against the reference."""

from __future__ import annotations

import pytest
import torch

from quantd.kernels.gpu.activation import glu
from quantd.kernels.ops import Activation
from quantd.kernels.reference import ReferenceOps

# Half a step of the output's type.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("width", [1, 93, 1024, 1536])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_glu(gpu_device: str, activation: Activation, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gate_up = (torch.randn(3, 2 * width) * 4).to(dtype)
    gate_up[0, :width] *= 100  # far out, where exp(-gate) overflows
    ours = glu(gate_up.to(gpu_device), activation).cpu()
    assert ours.dtype == dtype and ours.shape == (3, width)
    expected = ReferenceOps().glu(gate_up, activation)
    torch.testing.assert_close(ours.float(), expected, rtol=TOLERANCE[dtype] * 1.01, atol=3e-6)


def test_a_row_does_not_depend_on_its_company(gpu_device: str) -> None:
    gate_up = torch.randn(5, 2 * 77, device=gpu_device)
    whole = glu(gate_up, "silu")
    assert all(torch.equal(glu(gate_up[i : i + 1], "silu")[0], whole[i]) for i in range(5))


def test_no_rows(gpu_device: str) -> None:
    assert glu(torch.empty(0, 64, device=gpu_device), "silu").shape == (0, 32)
