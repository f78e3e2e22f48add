"""Weights of a format with made-up values: packed, they take what real ones of their shape take.

What a backend makes of a weight depends on its bits and groups, and on whether scales are halves and zero
points whole numbers, which the format tells; so sizes are known before any weight is read.
"""

from __future__ import annotations

import torch

from quantd.kernels.weights import DenseWeight, QuantizedWeight
from quantd.quant.gguf_blocks import BlockFormat
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


def blocks(shape: tuple[int, int], layout: BlockFormat) -> QuantizedWeight:
    """Codes as of a ggml type.

    As in real matrices some of its scales and offsets are too small, and others too fine, for fp16, where the
    type allows that: every second group has the ones, the others the other.
    """
    n, groups = shape[0], shape[1] // layout.group
    center = 2 ** (layout.bits - 1)
    scale = _alternate((2e-5, 1 / 30) if layout.products else (0.002, 0.0003), n, groups)
    if not layout.products:
        scale = scale.half().float()
    offset = -center * scale
    if layout.has_minima:
        least = torch.nextafter(offset.half(), torch.tensor(-1.0).half()).float()
        offset = torch.where(torch.arange(groups) % 2 == 0, least, torch.tensor(-0.05).half().float())
    codes = torch.zeros(shape, dtype=torch.uint8)
    return QuantizedWeight(codes, scale, offset.contiguous(), layout.bits, layout.group)


def _alternate(values: tuple[float, float], n: int, groups: int) -> torch.Tensor:
    return torch.tensor(values).repeat(-(-groups // 2))[:groups].expand(n, groups).contiguous()
