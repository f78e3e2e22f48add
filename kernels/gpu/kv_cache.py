"""The block pool in GPU memory: where a layer lies in it, and whole blocks moved within it, out to host
memory and back.

A block is one row of the pool's memory, all layers together (`quant.kv.KVPool.data`), so what moves it
knows of no keys, values or formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from quantd.kernels.ops import KVLayer

_PIECE_WORDS = 4096


@triton.jit(do_not_specialize_on_alignment=("source", "target"))
def _copy_kernel(pool, source, target, block_words, PIECE_WORDS: tl.constexpr):
    """Grid (copies, pieces of a block). pool: int32 [num_blocks, block_words]."""
    copy = tl.program_id(0)
    word = tl.program_id(1) * PIECE_WORDS + tl.arange(0, PIECE_WORDS)
    from_block, to_block = tl.load(source + copy).to(tl.int64), tl.load(target + copy).to(tl.int64)
    words = tl.load(pool + from_block * block_words + word, mask=word < block_words)
    tl.store(pool + to_block * block_words + word, words, mask=word < block_words)


def page_strides(layer: KVLayer) -> dict[str, int]:
    """What kernels are told of a layer's views, the same for keys and values, in elements of theirs."""
    k, scale = layer.k, layer.k_scale
    assert k.stride() == layer.v.stride() and k.stride(3) == 1, (k.stride(), layer.v.stride())
    strides = {"HEAD_STRIDE": k.stride(1), "TOKEN_STRIDE": k.stride(2), "BLOCK_SIZE": k.shape[2]}
    strides |= {"block_stride": k.stride(0), "scale_block_stride": 0, "SCALE_HEAD_STRIDE": 0}
    if scale is not None and layer.v_scale is not None:
        assert scale.stride() == layer.v_scale.stride() and scale.stride(2) == 1, scale.stride()
        strides |= {"scale_block_stride": scale.stride(0), "SCALE_HEAD_STRIDE": scale.stride(1)}
    return strides


def copy_blocks(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy blocks source[i] to target[i], ids int32 [n], within pool uint8 [num_blocks, block_bytes].

    All at once: no block may be a target twice, or source and target both.
    """
    assert pool.is_contiguous() and pool.shape[1] % 64 == 0, pool.shape
    assert source.shape == target.shape and source.dtype == target.dtype == torch.int32
    if len(source) == 0:
        return
    words = pool.view(torch.int32)
    grid = (len(source), triton.cdiv(words.shape[1], _PIECE_WORDS))
    _copy_kernel[grid](words, source, target, words.shape[1], PIECE_WORDS=_PIECE_WORDS, num_warps=8)


def gather_blocks(pool: Tensor, blocks: Sequence[int], host: Tensor) -> None:
    """Copy blocks out of pool uint8 [num_blocks, block_bytes] to rows 0, 1, ... of host memory.

    Where `host` is pinned the copies are only begun, in order on the current CUDA stream.
    """
    for row, first, count in _runs(blocks):
        host[row : row + count].copy_(pool[first : first + count], non_blocking=True)


def scatter_blocks(pool: Tensor, blocks: Sequence[int], host: Tensor) -> None:
    """Copy rows 0, 1, ... of host memory into these blocks of the pool; see gather_blocks."""
    for row, first, count in _runs(blocks):
        pool[first : first + count].copy_(host[row : row + count], non_blocking=True)


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Blocks that follow one another, each run one copy: (index of its first, its id, how many)."""
    start = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield start, blocks[start], i - start
            start = i
