"""RMSNorm of rows: alone, behind a sum, and with the result rounded to INT8 as W8A8 layers want it.

One program takes a whole row and keeps it in registers between its sum of squares and its scaling, so it
is read once. Nothing depends on the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantd.kernels.gpu.rounding import row_codes, row_scale

MAX_WIDTH = 16384
# Of a thread. Left to itself the assembler may store some of a row to make room for one more program.
_MAX_REGISTERS = 64


class Rounded(NamedTuple):
    """Rows in INT8: value = codes int8 [M, K] * scale float32 [M]."""

    codes: Tensor
    scale: Tensor


@triton.jit
def _store_rounded(x, codes, scales, row, columns, inside, WIDTH: tl.constexpr):
    """Store x, float32 and 0 outside, by the rule of `kernels.reference.rounded_inputs`.

    A row with a NaN or Inf gets the scale NaN: a maximum passes over a NaN.
    """
    scale = row_scale(tl.max(tl.abs(x), 0))
    tl.store(codes + row * WIDTH + columns, row_codes(x, scale), mask=inside)
    tl.store(scales + row, scale + tl.sum(x * 0.0, 0))


@triton.jit
def _norm_kernel(
    x,
    residual,
    weight,
    normed,
    total,
    codes,
    scales,
    eps,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """A program a row. ADDS: x becomes residual + scale * x, stored in `total`. ROUNDS: also to INT8."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    at = row * WIDTH + columns
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values = tl.load(residual + at, mask=inside, other=0.0) + scale * values
        tl.store(total + at, values, mask=inside)
    mean = tl.sum(values * values, 0) * (1 / WIDTH)
    weights = tl.load(weight + columns, mask=inside, other=0.0)
    out = (values * tl.rsqrt(mean + eps) * weights).to(normed.dtype.element_ty)
    tl.store(normed + at, out, mask=inside)
    if ROUNDS:
        _store_rounded(out.to(tl.float32), codes, scales, row, columns, inside, WIDTH)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x [M, H] * rsqrt(mean(x^2) + eps) * weight -> `dtype` [M, H]; weight float32 [H], H <= MAX_WIDTH."""
    return _launch(x, None, weight, eps, 1.0, dtype, rounds=False)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(rms_norm(s) in `dtype`, s in float32) with s = residual + scale * x; residual float32 [M, H]."""
    normed, total, _ = _launch(x, residual, weight, eps, scale, dtype, rounds=False)
    return normed, total


def rms_norm_rounded(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Rounded]:
    """rms_norm, and its result rounded to INT8, a row at a time."""
    normed, _, rounded = _launch(x, None, weight, eps, 1.0, dtype, rounds=True)
    return normed, rounded


def add_rms_norm_rounded(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Rounded]:
    """add_rms_norm, and the normed rows rounded to INT8."""
    return _launch(x, residual, weight, eps, scale, dtype, rounds=True)


def block_of(width: int) -> int:
    """Elements a program works on, a power of two."""
    assert 0 < width <= MAX_WIDTH, width
    return 1 << max((width - 1).bit_length(), 5)


def warps_of(block: int) -> int:
    """Sixteen elements a thread, of which one load takes four or eight."""
    return min(max(block // 512, 1), 16)


def _launch(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    scale: float,
    dtype: torch.dtype,
    rounds: bool,
) -> tuple[Tensor, Tensor, Rounded]:
    num_rows, width = x.shape
    assert x.is_contiguous() and weight.shape == (width,) and weight.dtype == torch.float32
    normed = torch.empty(x.shape, dtype=dtype, device=x.device)
    total = x
    if residual is not None:
        assert residual.shape == x.shape and residual.is_contiguous() and residual.dtype == torch.float32
        total = torch.empty_like(residual)
    rounded = Rounded(
        torch.empty(x.shape if rounds else 0, dtype=torch.int8, device=x.device),
        torch.empty(num_rows if rounds else 0, dtype=torch.float32, device=x.device),
    )
    if num_rows == 0:
        return normed, total, rounded
    block = block_of(width)
    _norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        normed,
        total,
        rounded.codes,
        rounded.scale,
        eps,
        scale,
        WIDTH=width,
        BLOCK=block,
        ADDS=residual is not None,
        ROUNDS=rounds,
        num_warps=warps_of(block),
        maxnreg=_MAX_REGISTERS,
    )
    return normed, total, rounded
