"""Weights and their exact products, for tests of the GPU's linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from quantd.kernels.gpu.tuning import ROW_CLASSES, Gpu, Plan, Shape, Tile, Tuning
from quantd.kernels.reference import rounded_inputs
from quantd.kernels.weights import QuantizedWeight, Weight

# So few SMs that a hundred rows leave no room for splits side by side.
TINY = Gpu("tiny", 90, 1)
TURING = Gpu("turing", 75, 40)


def quantized(
    n: int,
    k: int,
    bits: int,
    group_size: int,
    *,
    symmetric: bool = False,
    perm: bool = False,
    input_bits: int | None = None,
) -> QuantizedWeight:
    """Random; symmetric: the zero point is half of the codes' range, else anything."""
    groups = -(-k // group_size)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    scale = (torch.rand(n, groups) * 0.1 + 0.01).half().float()
    offset = -(2 ** (bits - 1)) * scale if symmetric else torch.randn(n, groups) - 2 ** (bits - 1) * scale
    order = torch.randperm(k) if perm else None
    return QuantizedWeight(codes, scale, offset, bits, group_size, order, input_bits)


def exact(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x @ W.T + bias in float64, with inputs rounded where the weight asks for that."""
    rounds = isinstance(weight, QuantizedWeight) and weight.input_bits is not None
    inputs = (rounded_inputs(x) if rounds else x).double()
    out = inputs @ weight.dequantize().double().T
    return out if bias is None else out + bias


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference of all, over the largest value."""
    assert actual.shape == expected.shape
    return ((actual.cpu().double() - expected).abs().max() / expected.abs().max()).item()


def split_tuning(shape: Shape, splits: int, gpu: Gpu = TINY) -> Tuning:
    """A plan with as many splits, and another tile for each class of rows."""
    tiles = [
        Tile(rows, n, warps, 2) for rows, n, warps in zip(ROW_CLASSES, (64, 128, 64), (4, 8, 4), strict=True)
    ]
    return Tuning(gpu, {shape: Plan(splits, dict(zip(ROW_CLASSES, tiles, strict=True)))})
