"""Rows of activations rounded to INT8, by the rule of W8A8 checkpoints."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantd.kernels.gpu.norm import Rounded
from quantd.kernels.gpu.rounding import row_codes, row_scale

_BLOCK = 1024


@triton.jit
def _quantize_kernel(x, codes, scales, K, BLOCK: tl.constexpr):
    """A program a row, which it reads twice: for the largest input, then to round.

    A row with an input that is not finite gets the scale NaN, so that nothing of it passes for a number.
    """
    row = tl.program_id(0)
    start = row.to(tl.int64) * K
    largest = tl.zeros([BLOCK], tl.float32)
    poison = tl.zeros([BLOCK], tl.float32)
    for first in range(0, K, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(x + start + columns, mask=columns < K, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
        poison += values * 0.0
    scale = row_scale(tl.max(largest, 0))
    tl.store(scales + row, scale + tl.sum(poison, 0))
    for first in range(0, K, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(x + start + columns, mask=columns < K, other=0.0).to(tl.float32)
        tl.store(codes + start + columns, row_codes(values, scale), mask=columns < K)


def quantize_rows(x: Tensor) -> Rounded:
    """x [M, K] -> codes int8 [M, K] and scales float32 [M], as `kernels.reference.rounded_inputs` has them.

    scale = absmax / 127.5, codes x / scale rounded half to even, -128 to 127. (Compressed-tensors' rule for
    dynamic inputs, a token at a time.)
    """
    num_rows, k = x.shape
    x = x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scale = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    if num_rows:
        _quantize_kernel[(num_rows,)](x, codes, scale, k, BLOCK=_BLOCK)
    return Rounded(codes, scale)
