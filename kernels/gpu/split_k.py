"""The last steps of a product: splits added up in order, then scales, bias and what logits ask for."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256


class Finish(NamedTuple):
    """What becomes of a product: + bias, for logits * factor and softcapped (0: not); dtype of the result."""

    dtype: torch.dtype
    logits: bool = False
    factor: float = 1.0
    softcap: float = 0.0


@triton.jit
def finish(total, row_scale, bias, factor, softcap, LOGITS: tl.constexpr):
    """total * row_scale + bias, the last two None or broadcast to it; LOGITS: * factor, then softcapped."""
    if row_scale is not None:
        total *= row_scale
    if bias is not None:
        total += bias
    if LOGITS:
        total *= factor
        if softcap > 0:
            total = softcap * (2.0 * tl.sigmoid(total * (2.0 / softcap)) - 1.0)
    return total


@triton.jit(do_not_specialize=["num_rows", "splits"])
def _add_kernel(
    parts,
    x_scale,
    bias,
    out,
    factor,
    softcap,
    num_rows,
    N,
    splits,
    BLOCK: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """out [num_rows, N] = the sum of parts [splits, num_rows, N], first to last; a program BLOCK of a row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < N
    total = tl.zeros([BLOCK], tl.float32)
    for split in range(splits):
        total += tl.load(parts + (split * num_rows + row) * N + columns, mask=inside, other=0.0)
    row_scale, added = None, None
    if x_scale is not None:
        row_scale = tl.load(x_scale + row)
    if bias is not None:
        added = tl.load(bias + columns, mask=inside, other=0.0)
    total = finish(total, row_scale, added, factor, softcap, LOGITS)
    tl.store(out + row * N + columns, total.to(out.dtype.element_ty), mask=inside)


def add_splits(parts: Tensor, x_scale: Tensor | None, bias: Tensor | None, how: Finish) -> Tensor:
    """Parts float32 [splits, M, N] -> their sum, finished, [M, N]; x_scale float32 [M], bias float32 [N]."""
    splits, num_rows, n = parts.shape
    out = torch.empty(num_rows, n, dtype=how.dtype, device=parts.device)
    _add_kernel[(num_rows, triton.cdiv(n, _BLOCK))](
        parts,
        x_scale,
        bias,
        out,
        how.factor,
        how.softcap,
        num_rows,
        n,
        splits,
        BLOCK=_BLOCK,
        LOGITS=how.logits,
        num_warps=2,
    )
    return out
