"""Products without tensor cores, for sm_75, to whose tensor cores Triton has no way: eight rows a program.

Weights are read in the tiles and blocks of tiled.py, by the threads that multiply with them, and unpacked
once for all rows of a program. A thread adds up, in float32, what it multiplies, one input after another;
threads that share an output have different inputs of it, and are added up at the end. A row's sums are made
in the same order whatever rows are beside it, though in another than those of tiled.py.

The compiler contracts no product and sum (see quantd.kernels.gpu), every one here is rounded once, by name,
and threads are added up two at a time: no number of rows that it compiles for makes it add otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantd.kernels.gpu.inputs import Inputs
from quantd.kernels.gpu.split_k import Finish, add_splits
from quantd.kernels.gpu.tiled import cut, shape_of
from quantd.kernels.gpu.tiles import floats, numbers, step_pairs
from quantd.kernels.gpu.weights import GpuWeight, Kind

_MOST_ROWS = 8  # of a program: the sums of more leave no registers
_BLOCK_N, _DENSE_BLOCK_N = 128, 64
_NUM_WARPS = 4
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _add_products(sums, weights, x):
    """sums [rows, ...] + weights [...] * x [rows, ...], rounded once."""
    return tl.fma(weights[None, :, :, :], x, sums)


@triton.jit
def _sum_pairs(sums, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, LANES: tl.constexpr):
    """sums [ROWS, A, B, LANES] -> [ROWS, A, B, LANES / 2]; of two there is but one way to add them."""
    return tl.sum(sums.reshape(ROWS, A, B, 2, LANES // 2), 3)


@triton.jit
def _store(sums, out, columns, first_row, num_rows, N, ROWS: tl.constexpr):
    """out [num_rows, N] = sums [ROWS, A, B, 1] of `columns` [A, B, 1]."""
    rows = first_row + tl.arange(0, ROWS)[:, None, None, None]
    tl.store(out + rows.to(tl.int64) * N + columns, sums, mask=(rows < num_rows) & (columns < N))


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
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    CENTER: tl.constexpr,
    BLOCKS_PER_GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """out float32 [splits, num_rows, N]; a program ROWS rows, BLOCK_N outputs and a split.

    x: int32 [num_rows, padded K / 2], two inputs in DTYPE a word.
    """
    STRIPS: tl.constexpr = BLOCK_N // 16
    BITS: tl.constexpr = LOW_BITS + HIGH_BITS
    first_row, split = tl.program_id(0) * ROWS, tl.program_id(2)
    strips = tl.program_id(1) * STRIPS + tl.arange(0, STRIPS)
    there = tl.minimum(strips, (N - 1) // 16)
    lane = tl.arange(0, 4)
    rows = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1)
    x_at = x + rows[:, None, None, None] * (num_blocks * (BLOCK_K // 2)) + lane
    headers = there[:, None, None] * 16 + tl.arange(0, 8)[None, :, None]
    header_stride = (N + 15) // 16 * 16
    # Of outputs g and g + 8 of each strip.
    total_0 = tl.zeros([ROWS, STRIPS, 8, 4], tl.float32)
    total_1 = tl.zeros([ROWS, STRIPS, 8, 4], tl.float32)
    end = tl.minimum(split * split_blocks + split_blocks, num_blocks)
    for block in range(split * split_blocks, end):
        sum_0 = tl.zeros([ROWS, STRIPS, 8, 4], tl.float32)
        sum_1 = tl.zeros([ROWS, STRIPS, 8, 4], tl.float32)
        for step in tl.static_range(BLOCK_K // 16):
            first_0, first_1, second_0, second_1 = step_pairs(
                low, high, there * num_blocks + block, step, LOW_BITS, HIGH_BITS, BLOCK_K, STRIPS
            )
            x_step = x_at + block * (BLOCK_K // 2) + 8 * step
            for half in tl.static_range(2):
                low_x, high_x = floats(tl.load(x_step + 4 * half), DTYPE)
                low_0, high_0 = numbers(first_0 if half == 0 else second_0, BITS, CENTER, DTYPE)
                low_1, high_1 = numbers(first_1 if half == 0 else second_1, BITS, CENTER, DTYPE)
                sum_0 = _add_products(_add_products(sum_0, low_0, low_x), high_0, high_x)
                sum_1 = _add_products(_add_products(sum_1, low_1, low_x), high_1, high_x)
        group = 0
        if BLOCKS_PER_GROUP > 0:
            group = block // BLOCKS_PER_GROUP
        at = group * header_stride + headers
        total_0 = tl.fma(sum_0, tl.load(scale + at).to(tl.float32)[None, :, :, :], total_0)
        total_1 = tl.fma(sum_1, tl.load(scale + at + 8).to(tl.float32)[None, :, :, :], total_1)
        if offset is not None:
            # Once for each output: in the first of the threads that share it.
            block_sums = tl.load(sums + block * num_rows + rows)[:, None, None, None]
            offset_0 = tl.where(lane == 0, tl.load(offset + at).to(tl.float32), 0.0)
            offset_1 = tl.where(lane == 0, tl.load(offset + at + 8).to(tl.float32), 0.0)
            total_0 = _add_products(total_0, offset_0, block_sums)
            total_1 = _add_products(total_1, offset_1, block_sums)
    out += split.to(tl.int64) * num_rows * N
    total_0 = _sum_pairs(_sum_pairs(total_0, ROWS, STRIPS, 8, 4), ROWS, STRIPS, 8, 2)
    total_1 = _sum_pairs(_sum_pairs(total_1, ROWS, STRIPS, 8, 4), ROWS, STRIPS, 8, 2)
    columns = strips[:, None, None] * 16 + tl.arange(0, 8)[None, :, None]
    _store(total_0, out, columns, first_row, num_rows, N, ROWS)
    _store(total_1, out, columns + 8, first_row, num_rows, N, ROWS)


@triton.jit(do_not_specialize=["num_rows", "split_blocks"])
def _dense_gemv_kernel(
    x,
    matrix,
    out,
    num_rows,
    N,
    num_blocks,
    split_blocks,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """As _gemv_kernel, of a matrix int32 [N, padded K / 2], two weights in DTYPE a word.

    Of every 64 inputs a thread has the weights of eight in a row, 16 bytes, for each of its outputs.
    """
    tl.static_assert(BLOCK_K == 64)
    first_row, split = tl.program_id(0) * ROWS, tl.program_id(2)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, 8)
    rows = tl.minimum(first_row + tl.arange(0, ROWS), num_rows - 1)
    x_at = x + rows[:, None, None, None] * (num_blocks * (BLOCK_K // 2)) + 4 * lane
    row_at = tl.minimum(columns, N - 1).to(tl.int64) * (num_blocks * (BLOCK_K // 2))
    at = matrix + row_at[:, None, None] + 4 * lane[None, :, None] + tl.arange(0, 4)
    total = tl.zeros([ROWS, 1, BLOCK_N, 8], tl.float32)
    end = tl.minimum(split * split_blocks + split_blocks, num_blocks)
    for block in range(split * split_blocks, end):
        words = tl.load(at + block * (BLOCK_K // 2))
        even, odd = tl.split(words.reshape(BLOCK_N, 8, 2, 2))
        word_0, word_2 = tl.split(even)
        word_1, word_3 = tl.split(odd)
        for i in tl.static_range(4):
            word = word_0 if i == 0 else word_1 if i == 1 else word_2 if i == 2 else word_3
            low, high = floats(word, DTYPE)
            low_x, high_x = floats(tl.load(x_at + block * (BLOCK_K // 2) + i), DTYPE)
            total = _add_products(total, low[None, :, :], low_x)
            total = _add_products(total, high[None, :, :], high_x)
    out += split.to(tl.int64) * num_rows * N
    total = _sum_pairs(_sum_pairs(total, ROWS, 1, BLOCK_N, 8), ROWS, 1, BLOCK_N, 4)
    total = _sum_pairs(total, ROWS, 1, BLOCK_N, 2)
    _store(total, out, columns[None, :, None], first_row, num_rows, N, ROWS)


def gemv(inputs: Inputs, weight: GpuWeight, how: Finish, splits: int) -> Tensor:
    """Prepared inputs of M rows, 16-bit floats, times W.T, finished -> [M, N]."""
    assert weight.kind is not Kind.INT8 and inputs.scale is None
    x, n = inputs.values, weight.shape[0]
    num_rows = len(x)
    split_blocks, splits = cut(shape_of(weight, x.dtype), splits)
    parts = torch.empty(splits, num_rows, n, dtype=torch.float32, device=x.device)
    rows = min(triton.next_power_of_2(num_rows), _MOST_ROWS)
    block_n = _DENSE_BLOCK_N if weight.kind is Kind.DENSE else _BLOCK_N
    # Programs that read the same weights run together: the L2 cache gives them to all but the first.
    grid = (triton.cdiv(num_rows, rows), triton.cdiv(n, block_n), splits)
    pairs, options = x.view(torch.int32), {"ROWS": rows, "BLOCK_N": block_n, "BLOCK_K": weight.block_k}
    options |= {"DTYPE": _TYPES[x.dtype], "num_warps": _NUM_WARPS}
    sizes = (num_rows, n, weight.num_blocks, split_blocks)
    if weight.kind is Kind.DENSE:
        _dense_gemv_kernel[grid](pairs, weight.low.view(torch.int32), parts, *sizes, **options)
    else:
        _gemv_kernel[grid](
            pairs,
            inputs.sums,
            weight.low,
            weight.high,
            weight.scale,
            weight.offset,
            parts,
            *sizes,
            LOW_BITS=weight.low_bits,
            HIGH_BITS=weight.high_bits,
            CENTER=weight.center,
            BLOCKS_PER_GROUP=weight.blocks_per_group,
            **options,
        )
    return add_splits(parts, None, weight.bias, how)
