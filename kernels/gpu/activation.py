"""The gate of an MLP: activation(gate) * up, elementwise over the two halves of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantd.kernels.ops import Activation

_BLOCK = 1024  # with four warps, eight elements a thread: one 16-byte load of each half


@triton.jit
def _glu_kernel(gate_up, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr):
    """gate_up [M, 2 * WIDTH] -> out [M, WIDTH]; a program for BLOCK columns of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = gate_up + row * (2 * WIDTH) + columns
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(u)) / 2 = sigmoid(2 u) with u = sqrt(2 / pi) * (gate + 0.044715 gate^3)
        gate = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        gate = gate * tl.sigmoid(gate)
    tl.store(out + row * WIDTH + columns, gate * up, mask=inside)


def glu(gate_up: Tensor, activation: Activation) -> Tensor:
    """activation(left half) * right half of gate_up [M, 2 I] -> [M, I] in the type of gate_up."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous() and gate_up.shape[1] == 2 * width
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows > 0:
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        _glu_kernel[grid](gate_up, out, WIDTH=width, BLOCK=_BLOCK, GELU=activation == "gelu_tanh")
    return out
