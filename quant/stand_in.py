"""Weights of a format with made-up values: packed, they take what real ones of their shape take.

What a backend makes of a weight depends on its bits and groups, and on whether scales are halves and zero
points whole numbers, which the format tells; so sizes are known before any weight is read.
"""

from __future__ import annotations

import torch

from quantd.kernels.weights import DenseWeight, QuantizedWeight
from quantd.quant.packing import affine

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}


def dense(shape: tuple[int, int], dtype: torch.dtype) -> DenseWeight:
    """A plain weight."""
    return DenseWeight(torch.zeros(shape, dtype=dtype))


def quantized(
    shape: tuple[int, int],
    bits: int,
    group_size: int | None,
    scale_dtype: torch.dtype,
    symmetric: bool,
    ordered: bool = False,
    input_bits: int | None = None,
) -> QuantizedWeight:
    """Codes with scales and zero points. group_size: None for all inputs. ordered: with act-order."""
    n, k = shape
    size = min(group_size or k, k)
    scale = torch.full((n, -(-k // size)), 0.01, dtype=scale_dtype)
    zero = 2 ** (bits - 1) - (not symmetric)
    return QuantizedWeight(
        torch.zeros(shape, dtype=torch.uint8),
        *affine(scale, zero),
        bits=bits,
        group_size=size,
        perm=torch.arange(k).flip(0) if ordered else None,
        input_bits=input_bits,
    )
