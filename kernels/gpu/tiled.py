"""Products of activations with packed weights on tensor cores, for any number of rows, with the same bits.

The weights are the first operand, straight from registers, and the activations the second, so the rows of a
step are the short side of a tile: 16 for one row, with nothing read for the other 15. A true GEMV would
multiply and add in another order and give other bits; and it has more instructions a weight than a tensor
core needs, which matters where memory is fast.

Inputs are walked in blocks no longer than a group, each block's sum scaled and added to the accumulator, so
codes need no scaling. Long inputs are cut into splits: side by side where rows are few (split_k.py adds them
up), one after another in a program where they are many. Blocks, splits and the order of every addition are
the same for any number of rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantd.kernels.gpu.inputs import Inputs
from quantd.kernels.gpu.split_k import Finish, add_splits, finish
from quantd.kernels.gpu.tiles import INT8, weight_tile
from quantd.kernels.gpu.tuning import Gpu, Shape, Tile, max_registers
from quantd.kernels.gpu.weights import GpuWeight, Kind


@triton.jit
def _scaled(total, sums, scale, offset, headers):
    """total [columns, rows] * scale + sums [rows] * offset, each where it is not None."""
    if scale is not None:
        total *= tl.load(scale + headers).to(tl.float32)[:, None]
    if offset is not None:
        total = tl.fma(tl.load(offset + headers).to(tl.float32)[:, None], sums[None, :], total)
    return total


@triton.jit
def _headers(scale, offset, block, num_blocks, stride, columns, BLOCKS_PER_GROUP: tl.constexpr):
    """Scales and offsets of a block, or of the last for one behind it; scales again where offset is None."""
    scales, offsets = 0.0, 0.0
    if BLOCKS_PER_GROUP > 0:
        at = tl.minimum(block, num_blocks - 1) // BLOCKS_PER_GROUP * stride + columns
        scales = tl.load(scale + at)
        offsets = scales if offset is None else tl.load(offset + at)
    return scales, offsets


@triton.jit
def _store(total, rows, columns, x_scale, bias, out, factor, softcap, num_rows, N, LOGITS: tl.constexpr):
    """out [num_rows, N] at (rows, columns) = total [columns, rows], finished."""
    inside = rows < num_rows
    row_scale, added = None, None
    if x_scale is not None:
        row_scale = tl.load(x_scale + rows, mask=inside, other=0.0)[None, :]
    if bias is not None:
        added = tl.load(bias + columns, mask=columns < N, other=0.0)[:, None]
    total = finish(total, row_scale, added, factor, softcap, LOGITS)
    at = rows.to(tl.int64)[None, :] * N + columns[:, None]
    mask = inside[None, :] & (columns < N)[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "split_blocks"])
def _matmul_kernel(
    x,
    sums,
    x_scale,
    low,
    high,
    scale,
    offset,
    bias,
    out,
    factor,
    softcap,
    num_rows,
    N,
    num_blocks,
    split_blocks,
    KIND: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    CENTER: tl.constexpr,
    BLOCKS_PER_GROUP: tl.constexpr,
    BLOCKS_PER_STEP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr,
    FINISH: tl.constexpr,
    LOGITS: tl.constexpr,
):
    """A program BLOCK_M rows, BLOCK_N outputs and SPLITS splits of `split_blocks` blocks each.

    FINISH: out [num_rows, N] is the result; else float32 [splits, num_rows, N], to be added up and finished.
    BLOCKS_PER_GROUP 0: one scale (or none) for all inputs.
    """
    DTYPE: tl.constexpr = x.dtype.element_ty
    SUM: tl.constexpr = tl.int32 if KIND == INT8 else tl.float32
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = rows < num_rows
    first_column = tl.program_id(1) * BLOCK_N
    columns = first_column + tl.arange(0, BLOCK_N)
    headers = tl.minimum(columns, N - 1)
    header_stride = (N + 15) // 16 * 16
    x_at = x + rows[None, :] * (num_blocks * BLOCK_K) + tl.arange(0, BLOCK_K)[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for split in range(tl.program_id(2) * SPLITS, tl.program_id(2) * SPLITS + SPLITS):
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        whole = tl.zeros([BLOCK_N, BLOCK_M], SUM)
        whole_sums = tl.zeros([BLOCK_M], tl.float32)
        first, end = split * split_blocks, tl.minimum(split * split_blocks + split_blocks, num_blocks)
        # Always a block ahead: these loads are too narrow for the compiler to pipeline them.
        scales, offsets = _headers(scale, offset, first, num_blocks, header_stride, headers, BLOCKS_PER_GROUP)
        for step in tl.range(first, end, BLOCKS_PER_STEP):
            for i in tl.static_range(BLOCKS_PER_STEP):
                block = step + i
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
                    DTYPE,
                    BLOCK_N,
                    BLOCK_K,
                )
                inputs = tl.load(x_at + block * BLOCK_K, mask=inside[None, :], other=0)
                if BLOCKS_PER_GROUP == 0:
                    whole = tl.dot(weights, inputs, whole, input_precision="ieee", out_dtype=SUM)
                    if offset is not None:
                        whole_sums += tl.load(sums + block * num_rows + rows, mask=inside, other=0.0)
                else:
                    if offset is not None:
                        block_sums = tl.load(sums + block * num_rows + rows, mask=inside, other=0.0)
                    part = tl.dot(weights, inputs, input_precision="ieee", out_dtype=SUM).to(tl.float32)
                    if offset is not None:
                        acc = tl.fma(offsets.to(tl.float32)[:, None], block_sums[None, :], acc)
                    acc = tl.fma(part, scales.to(tl.float32)[:, None], acc)
                    scales, offsets = _headers(
                        scale, offset, block + 1, num_blocks, header_stride, headers, BLOCKS_PER_GROUP
                    )
        if BLOCKS_PER_GROUP == 0:
            acc = _scaled(whole.to(tl.float32), whole_sums, scale, offset, headers)
        total += acc
    if not FINISH:
        out += tl.program_id(2).to(tl.int64) * num_rows * N
    _store(total, rows, columns, x_scale, bias, out, factor, softcap, num_rows, N, LOGITS)


def shape_of(weight: GpuWeight, dtype: torch.dtype) -> Shape:
    """What plans are found by. dtype: of activations."""
    input_bits = 8 if weight.kind is Kind.INT8 else 8 * dtype.itemsize
    return Shape(weight.shape[0], weight.padded_k, weight.bits, weight.block_k, input_bits)


def matmul(inputs: Inputs, weight: GpuWeight, how: Finish, splits: int, tile: Tile, gpu: Gpu) -> Tensor:
    """Prepared inputs of M rows times W.T, finished -> [M, N]."""
    num_rows, n = len(inputs.values), weight.shape[0]
    shape = shape_of(weight, inputs.values.dtype)
    split_blocks, splits = cut(shape, splits)
    programs = (triton.cdiv(num_rows, tile.block_m), triton.cdiv(n, tile.block_n))
    # Side by side where rows and outputs alone do not keep the GPU busy; one after another needs no room.
    beside = splits if programs[0] * programs[1] <= 2 * gpu.num_sms else 1
    finishes = beside == 1
    out_shape = (num_rows, n) if finishes else (beside, num_rows, n)
    dtype = how.dtype if finishes else torch.float32
    out = torch.empty(out_shape, dtype=dtype, device=inputs.values.device)
    _matmul_kernel[(*programs, beside)](
        inputs.values,
        inputs.sums,
        inputs.scale if finishes else None,
        weight.low,
        weight.high,
        weight.scale,
        weight.offset,
        weight.bias if finishes else None,
        out,
        how.factor,
        how.softcap,
        num_rows,
        n,
        weight.num_blocks,
        split_blocks,
        KIND=int(weight.kind),
        LOW_BITS=weight.low_bits,
        HIGH_BITS=weight.high_bits,
        CENTER=weight.center,
        BLOCKS_PER_GROUP=weight.blocks_per_group,
        BLOCKS_PER_STEP=shape.blocks_per_step,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=weight.block_k,
        SPLITS=splits // beside,
        FINISH=finishes,
        LOGITS=how.logits and finishes,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        maxnreg=max_registers(tile, shape, gpu),
    )
    return out if finishes else add_splits(out, inputs.scale, weight.bias, how)


def cut(shape: Shape, splits: int) -> tuple[int, int]:
    """(blocks a split, splits): whole steps, as even as they come, none empty."""
    steps = shape.num_blocks // shape.blocks_per_step
    split_steps = -(-steps // splits)
    return split_steps * shape.blocks_per_step, -(-steps // split_steps)
