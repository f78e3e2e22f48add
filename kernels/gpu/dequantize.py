"""Whole matrices out of packed weights, for the vendor's product, and single rows, for embeddings."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantd.kernels.gpu.tiles import weight_tile
from quantd.kernels.gpu.weights import STRIP, GpuWeight, Kind

_ROWS = 64  # of a program of the dequantizing kernel


@triton.jit
def _load_headers(scale, offset, rows, block, N, BLOCKS_PER_GROUP: tl.constexpr):
    """Scale and offset, float32 [len(rows)], of a block of inputs."""
    stride = (N + 15) // 16 * 16
    group = 0
    if BLOCKS_PER_GROUP > 0:
        group = block // BLOCKS_PER_GROUP
    scales = tl.load(scale + group * stride + rows).to(tl.float32)
    offsets = tl.zeros_like(scales)
    if offset is not None:
        offsets = tl.load(offset + group * stride + rows).to(tl.float32)
    return scales, offsets


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _dequantize_kernel(
    low,
    high,
    scale,
    offset,
    out,
    first_row,
    num_rows,
    N,
    num_blocks,
    KIND: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    CENTER: tl.constexpr,
    BLOCKS_PER_GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out [num_rows, padded K] = rows `first_row` and up; a program a block of inputs of BLOCK_N rows."""
    block = tl.program_id(0)
    first = tl.program_id(1) * BLOCK_N
    tile = weight_tile(
        low,
        high,
        first_row + first,
        block,
        N,
        num_blocks,
        KIND,
        LOW_BITS,
        HIGH_BITS,
        CENTER,
        tl.float32,
        BLOCK_N,
        BLOCK_K,
    )
    rows = first + tl.arange(0, BLOCK_N)
    scales, offsets = _load_headers(
        scale, offset, tl.minimum(first_row + rows, N - 1), block, N, BLOCKS_PER_GROUP
    )
    values = tl.fma(tile, scales[:, None] + tl.zeros_like(tile), offsets[:, None] + tl.zeros_like(tile))
    columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
    at = rows.to(tl.int64)[:, None] * (num_blocks * BLOCK_K) + columns[None, :]
    tl.store(out + at, values.to(out.dtype.element_ty), mask=(rows < num_rows)[:, None])


@triton.jit
def _embedding_kernel(
    token_ids,
    low,
    high,
    scale,
    offset,
    index,
    out,
    factor,
    N,
    K,
    num_blocks,
    KIND: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    CENTER: tl.constexpr,
    BLOCKS_PER_GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A row of the weight for each token, times `factor`; a program a token and a block of inputs.

    The row's strip is unpacked whole: sixteen rows in the place of one, of the few that a step asks for.
    """
    token, block = tl.program_id(0), tl.program_id(1)
    row = tl.load(token_ids + token)
    first = row // 16 * 16
    strip = weight_tile(
        low,
        high,
        first,
        block,
        N,
        num_blocks,
        KIND,
        LOW_BITS,
        HIGH_BITS,
        CENTER,
        tl.float32,
        16,
        BLOCK_K,
    )
    codes = tl.sum(tl.where((first + tl.arange(0, 16) == row)[:, None], strip, 0.0), 0)
    scales, offsets = _load_headers(scale, offset, row, block, N, BLOCKS_PER_GROUP)
    columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
    if index is not None:
        columns = tl.load(index + columns)
    values = tl.fma(codes, scales + tl.zeros_like(codes), offsets + tl.zeros_like(codes)) * factor
    inside = (columns >= 0) & (columns < K)
    tl.store(out + token.to(tl.int64) * K + columns, values, mask=inside)


def dequantize(weight: GpuWeight, first_row: int, num_rows: int, dtype: torch.dtype) -> Tensor:
    """Rows first_row : first_row + num_rows of quantized weights -> dtype [num_rows, padded K].

    Columns in packed order, as `gathered` inputs are. first_row: a multiple of 16.
    """
    assert weight.kind is not Kind.DENSE and first_row % STRIP == 0, (weight.kind, first_row)
    out = torch.empty(num_rows, weight.padded_k, dtype=dtype, device=weight.low.device)
    _dequantize_kernel[(weight.num_blocks, triton.cdiv(num_rows, _ROWS))](
        weight.low,
        weight.high,
        weight.scale,
        weight.offset,
        out,
        first_row,
        num_rows,
        weight.shape[0],
        weight.num_blocks,
        KIND=int(weight.kind),
        LOW_BITS=weight.low_bits,
        HIGH_BITS=weight.high_bits,
        CENTER=weight.center,
        BLOCKS_PER_GROUP=weight.blocks_per_group,
        BLOCK_N=_ROWS,
        BLOCK_K=weight.block_k,
    )
    return out


def embedding(token_ids: Tensor, weight: GpuWeight, scale: float = 1.0) -> Tensor:
    """Rows `token_ids` int32 [M] of a weight, times scale -> float32 [M, K]."""
    n, k = weight.shape
    if weight.kind is Kind.DENSE:
        return weight.low[:, :k].index_select(0, token_ids).float() * scale
    out = torch.empty(len(token_ids), k, dtype=torch.float32, device=weight.low.device)
    if len(token_ids) == 0:
        return out
    _embedding_kernel[(len(token_ids), weight.num_blocks)](
        token_ids,
        weight.low,
        weight.high,
        weight.scale,
        weight.offset,
        weight.index,
        out,
        scale,
        n,
        k,
        weight.num_blocks,
        KIND=int(weight.kind),
        LOW_BITS=weight.low_bits,
        HIGH_BITS=weight.high_bits,
        CENTER=weight.center,
        BLOCKS_PER_GROUP=weight.blocks_per_group,
        BLOCK_K=weight.block_k,
        num_warps=1,
    )
    return out
