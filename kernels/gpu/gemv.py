"""Products without tensor cores, a row at a time: for sm_75, to whose tensor cores Triton has no way.

Reads the same tiles as tiled.py, in the same blocks, but adds in another order: not the same bits. Each row
is computed by itself, so rows do not depend on each other here either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantd.kernels.gpu.inputs import Inputs
from quantd.kernels.gpu.split_k import Finish, add_splits
from quantd.kernels.gpu.tiled import cut, shape_of
from quantd.kernels.gpu.tiles import weight_tile
from quantd.kernels.gpu.weights import GpuWeight

_BLOCK_N = 64
_NUM_WARPS = 8


@triton.jit(do_not_specialize=["num_rows", "split_blocks"])
def _gemv_kernel(
    x,
    sums,
    low,
    high,
    scale,
    offset,
    out,
    num_rows,
    N,
    num_blocks,
    split_blocks,
    KIND: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    CENTER: tl.constexpr,
    BLOCKS_PER_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out float32 [splits, num_rows, N]; a program BLOCK_N outputs of a row and a split."""
    first_column, split, row = tl.program_id(0) * BLOCK_N, tl.program_id(1), tl.program_id(2)
    columns = first_column + tl.arange(0, BLOCK_N)
    headers = tl.minimum(columns, N - 1)
    header_stride = (N + 15) // 16 * 16
    x_at = x + row * (num_blocks * BLOCK_K) + tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_N], tl.float32)
    end = tl.minimum(split * split_blocks + split_blocks, num_blocks)
    for block in range(split * split_blocks, end):
        weights = weight_tile(
            low,
            high,
            first_column,
            block,
            N,
            num_blocks,
            KIND,
            LOW_BITS,
            HIGH_BITS,
            CENTER,
            x.dtype.element_ty,
            BLOCK_N,
            BLOCK_K,
        ).to(tl.float32)
        inputs = tl.load(x_at + block * BLOCK_K).to(tl.float32)
        group = 0
        if BLOCKS_PER_GROUP > 0:
            group = block // BLOCKS_PER_GROUP
        part = tl.sum(weights * inputs[None, :], 1)
        if scale is not None:
            part *= tl.load(scale + group * header_stride + headers).to(tl.float32)
        if offset is not None:
            offsets = tl.load(offset + group * header_stride + headers).to(tl.float32)
            total += offsets * tl.load(sums + block * num_rows + row)
        total += part
    at = (split * num_rows + row).to(tl.int64) * N + columns
    tl.store(out + at, total, mask=columns < N)


def gemv(inputs: Inputs, weight: GpuWeight, how: Finish, splits: int) -> Tensor:
    """Prepared inputs of M rows, floats, times W.T, finished -> [M, N]."""
    num_rows, n = len(inputs.values), weight.shape[0]
    split_blocks, splits = cut(shape_of(weight, inputs.values.dtype), splits)
    parts = torch.empty(splits, num_rows, n, dtype=torch.float32, device=inputs.values.device)
    _gemv_kernel[(triton.cdiv(n, _BLOCK_N), splits, num_rows)](
        inputs.values,
        inputs.sums,
        weight.low,
        weight.high,
        weight.scale,
        weight.offset,
        parts,
        num_rows,
        n,
        weight.num_blocks,
        split_blocks,
        KIND=int(weight.kind),
        LOW_BITS=weight.low_bits,
        HIGH_BITS=weight.high_bits,
        CENTER=weight.center,
        BLOCKS_PER_GROUP=weight.blocks_per_group,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=weight.block_k,
        num_warps=_NUM_WARPS,
    )
    return add_splits(parts, inputs.scale, weight.bias, how)
