"""Activations brought into the order of a packed weight's columns, and their sums, before a product.

Act-order and padding are undone here, once a row, and not in every tile of the product. The sum of a block of
inputs, times the offset of the weights there, is what that offset adds to an output.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantd.kernels.gpu.int8 import quantize_rows
from quantd.kernels.gpu.norm import Rounded
from quantd.kernels.gpu.weights import GpuWeight, Kind

_ELEMENTS = 1024  # of a program


class Inputs(NamedTuple):
    """Inputs of a product. values: [M, padded K], floats or INT8 codes, in the order of the packed columns.

    sums: float32 [num_blocks, M] of each block, None where no offset asks for them. scale: float32 [M] of
    INT8 codes.
    """

    values: Tensor
    sums: Tensor | None
    scale: Tensor | None


@triton.jit(do_not_specialize=["num_rows"])
def _inputs_kernel(
    x, index, values, sums, num_rows, K, num_blocks, BLOCKS: tl.constexpr, BLOCK_K: tl.constexpr
):
    """A program a row and BLOCKS blocks. values None: x is in order already; sums None: none are wanted."""
    row = tl.program_id(0)
    blocks = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    columns = blocks[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    inside = (blocks < num_blocks)[:, None] & (columns >= 0)
    at = columns
    if index is not None:
        at = tl.load(index + columns, mask=inside, other=-1)
    taken = tl.load(x + row.to(tl.int64) * K + at, mask=inside & (at >= 0), other=0)
    if values is not None:
        tl.store(values + row.to(tl.int64) * num_blocks * BLOCK_K + columns, taken, mask=inside)
    if sums is not None:
        tl.store(sums + blocks * num_rows + row, tl.sum(taken.to(tl.float32), 1), mask=blocks < num_blocks)


def prepare(x: Tensor, weight: GpuWeight) -> Inputs:
    """x [M, K] as the product with `weight` takes it; rounded first where that asks for INT8 inputs."""
    if not weight.rounds_inputs:
        return _prepare(x, weight, None)
    return prepare_rounded(quantize_rows(x), weight, x.dtype)


def prepare_rounded(rounded: Rounded, weight: GpuWeight, dtype: torch.dtype) -> Inputs:
    """Rounded rows as the product takes them: codes, or floats in `dtype` where the weight is not INT8."""
    if weight.kind is Kind.INT8:
        return _prepare(rounded.codes, weight, rounded.scale)
    return _prepare((rounded.codes * rounded.scale.unsqueeze(1)).to(dtype), weight, None)


def _prepare(x: Tensor, weight: GpuWeight, scale: Tensor | None) -> Inputs:
    x = x.contiguous()
    num_rows, k = x.shape
    assert k == weight.shape[1], (x.shape, weight.shape)
    if weight.index is None and weight.offset is None:
        return Inputs(x, None, scale)
    values, sums = None, None
    if weight.index is not None:
        values = torch.empty(num_rows, weight.padded_k, dtype=x.dtype, device=x.device)
    if weight.offset is not None:
        sums = torch.empty(weight.num_blocks, num_rows, dtype=torch.float32, device=x.device)
    blocks = _ELEMENTS // weight.block_k
    _inputs_kernel[(num_rows, triton.cdiv(weight.num_blocks, blocks))](
        x,
        weight.index,
        values,
        sums,
        num_rows,
        k,
        weight.num_blocks,
        BLOCKS=blocks,
        BLOCK_K=weight.block_k,
    )
    return Inputs(x if values is None else values, sums, scale)
