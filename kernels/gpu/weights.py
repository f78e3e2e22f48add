"""Weights as the Triton kernels read them: repacked once, at load, into tiles that need no shuffles.

A tile is 16 outputs (a strip) by `block_k` inputs, contiguous in memory and ordered as the 32 lanes of a
warp hold the first operand of a 16 x 8 x 16 tensor-core product: lane 4 g + t has outputs g and g + 8 of
inputs 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of every 16. A lane's words lie side by side, so a warp reads a tile
in 128-bit loads, and a shift and a mask bring two codes at once to the low ends of a word's halves.

Codes of 3, 5 and 6 bits are two planes, of the low bits and of the high ones, each packed that way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from quantd.kernels.weights import DenseWeight, QuantizedWeight, Weight

STRIP = 16  # outputs of a tile
DENSE_BLOCK_K = 64
_BLOCKS_K = (128, 64, 32, 16)
_PART_CODES = 4 << 20  # packed at a time
_MAX_PADDING = 1.5  # stored codes for each real one; above it a plain matrix is kept


class Kind(IntEnum):
    """How the matrix of a weight is kept; see GpuWeight."""

    PACKED = 0
    INT8 = 1
    DENSE = 2


@dataclass(frozen=True)
class GpuWeight:
    """A packed weight of N outputs and K inputs, K padded to `num_blocks` blocks of `block_k`.

    low, high: tiles of codes, int32 words (Kind.PACKED) or int8 (Kind.INT8, `high` None), or the plain matrix
    [N, padded K] in compute dtype (Kind.DENSE). A code is low | high << low_bits.
    center: what the kernels subtract from a packed code, half of the range of the checkpoint's; INT8 tiles
    hold it subtracted.
    scale, offset: [groups, N padded to strips], offset that of the centred codes, None where it is zero;
    both None if dense. blocks_per_group: blocks under one scale, 0 if a scale is for all inputs.
    index: int32 [padded K], the input that each packed column multiplies, -1 for none; None: column k is
    input k. bias: float32 [N].
    rounds_inputs: inputs are rounded to INT8 per row first (W8A8).
    """

    shape: tuple[int, int]
    kind: Kind
    low: Tensor
    high: Tensor | None
    low_bits: int
    high_bits: int
    center: int
    block_k: int
    num_blocks: int
    blocks_per_group: int
    scale: Tensor | None
    offset: Tensor | None
    index: Tensor | None
    bias: Tensor | None
    rounds_inputs: bool

    @property
    def bits(self) -> int:
        """Bits a stored code."""
        return self.low_bits + self.high_bits

    @property
    def padded_k(self) -> int:
        """Packed columns."""
        return self.num_blocks * self.block_k

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        tensors = (self.low, self.high, self.scale, self.offset, self.index, self.bias)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


class _Blocks(NamedTuple):
    """Groups cut into blocks of `block_k` inputs, each group padded to whole blocks."""

    block_k: int
    blocks_per_group: int


def pack(
    weight: Weight,
    bias: Tensor | None,
    device: torch.device | str,
    dtype: torch.dtype,
    int8_dots: bool = True,
) -> GpuWeight:
    """Pack a weight [N, K] for `device`; bias: [N]. dtype: of activations, and of plain matrices.

    int8_dots: whether inputs rounded to INT8 may meet codes in an INT8 product (not on sm_75, which Triton
    gives no tensor-core products); else both are multiplied as floats.
    Groups so small or odd that padding them to blocks of 16 would take half again the memory become a
    plain matrix.
    """
    device = torch.device(device)
    bias = None if bias is None else bias.to(device, torch.float32).contiguous()
    if isinstance(weight, DenseWeight):
        return _pack_dense(weight.values, bias, device, dtype, rounds_inputs=False)
    rounds_inputs = weight.input_bits is not None
    integer = rounds_inputs and int8_dots
    blocks = _blocks(weight.group_size, min_block=32 if integer else 16)
    if blocks.block_k * blocks.blocks_per_group > _MAX_PADDING * weight.group_size and not integer:
        return _pack_dense(weight.dequantize(), bias, device, dtype, rounds_inputs)
    return _pack_codes(weight, blocks, integer, bias, device, dtype)


def _pack_dense(
    values: Tensor, bias: Tensor | None, device: torch.device, dtype: torch.dtype, rounds_inputs: bool
) -> GpuWeight:
    n, k = values.shape
    num_blocks = -(-k // DENSE_BLOCK_K)
    padded_k = num_blocks * DENSE_BLOCK_K
    low = torch.zeros(n, padded_k, dtype=dtype, device=device)
    for rows in _parts(n, padded_k):
        low[rows, :k] = values[rows].to(device)
    return GpuWeight(
        shape=(n, k),
        kind=Kind.DENSE,
        low=low,
        high=None,
        low_bits=8 * dtype.itemsize,
        high_bits=0,
        center=0,
        block_k=DENSE_BLOCK_K,
        num_blocks=num_blocks,
        blocks_per_group=0,
        scale=None,
        offset=None,
        index=_index(None, k, k, padded_k, device),
        bias=bias,
        rounds_inputs=rounds_inputs,
    )


def _pack_codes(
    weight: QuantizedWeight,
    blocks: _Blocks,
    integer: bool,
    bias: Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> GpuWeight:
    n, k = weight.shape
    group, padded_group = weight.group_size, blocks.block_k * blocks.blocks_per_group
    center = 2 ** (weight.bits - 1)
    low_bits, high_bits = (8, 0) if integer else plane_bits(weight.bits, blocks.block_k)

    def tiles(rows: slice) -> list[Tensor]:
        """Of some outputs, in each plane."""
        codes = _pad_groups(weight.codes[rows].to(device), group, padded_group, 0)
        codes = functional.pad(codes, (0, 0, 0, -len(codes) % STRIP))
        if integer:
            return [pack_int8(codes, center, blocks.block_k)]
        return pack_planes(codes, low_bits, high_bits, blocks.block_k)

    planes = _in_parts(n, k, tiles)
    scale = weight.scale.to(device)
    offset = weight.offset.to(device) + center * scale
    return GpuWeight(
        shape=(n, k),
        kind=Kind.INT8 if integer else Kind.PACKED,
        low=planes[0],
        high=planes[1] if high_bits else None,
        low_bits=low_bits,
        high_bits=high_bits,
        center=center,
        block_k=blocks.block_k,
        num_blocks=planes[0].shape[1],
        blocks_per_group=0 if weight.scale.shape[1] == 1 else blocks.blocks_per_group,
        scale=_headers(scale, dtype),
        offset=_headers(offset, dtype) if bool(offset.any()) else None,
        index=_index(weight.perm, k, group, padded_group, device),
        bias=bias,
        rounds_inputs=weight.input_bits is not None,
    )


def _blocks(group_size: int, min_block: int) -> _Blocks:
    """The largest blocks that waste (almost) no memory on padding."""
    counts = {block: -(-group_size // block) for block in _BLOCKS_K if block >= min_block}
    least = min(block * count for block, count in counts.items())
    block = next(block for block, count in counts.items() if block * count <= 1.05 * least)
    return _Blocks(block, counts[block])


def plane_bits(bits: int, block_k: int) -> tuple[int, int]:
    """Widths (low, high) of the planes that hold codes of `bits` bits in the least memory; high may be 0.

    Widths are powers of two, so that fields do not straddle words, and a lane's share of a tile, block_k / 2
    codes, fills whole words.
    """
    widths = [width for width in (1, 2, 4, 8) if width * block_k >= 64]
    pairs = [(low, high) for low in widths for high in (0, *widths) if high < low and low + high >= bits]
    return min(pairs, key=lambda pair: (sum(pair), pair[1]))


def _in_parts(n: int, k: int, tiles: Callable[[slice], list[Tensor]]) -> list[Tensor]:
    """The tiles of all n outputs in each plane, from those of a few at a time.

    What packing takes beside the result stays with torch, in pieces between results: a KV pool, which is one
    piece, cannot have it.
    """
    planes: list[Tensor] = []
    for rows in _parts(n, k):
        parts = tiles(rows)
        if not planes:
            planes = [
                torch.empty(-(-n // STRIP), *part.shape[1:], dtype=part.dtype, device=part.device)
                for part in parts
            ]
        for plane, part in zip(planes, parts, strict=True):
            plane[rows.start // STRIP : -(-rows.stop // STRIP)] = part
    return planes


def _parts(n: int, k: int) -> Iterator[slice]:
    """Outputs of a matrix [n, k] that are packed together: whole strips."""
    step = max(_PART_CODES // k // STRIP, 1) * STRIP
    yield from (slice(first, min(first + step, n)) for first in range(0, n, step))


def pack_planes(codes: Tensor, low_bits: int, high_bits: int, block_k: int) -> list[Tensor]:
    """Codes uint8 [N, K], N in whole strips and K in whole blocks -> int32 words of each plane."""
    low = _pack_plane(codes & (2**low_bits - 1), low_bits, block_k)
    return [low, _pack_plane(codes >> low_bits, high_bits, block_k)] if high_bits else [low]


def _pack_plane(codes: Tensor, bits: int, block_k: int) -> Tensor:
    """One plane: int32 [strips, blocks, words a tile].

    A code's place in its tile is (unit, lane g, lane t, word, half, field). Fields count steps of 16 inputs
    first; where a lane has fewer than four words, the strip's halves and then the step's share words.
    """
    words = block_k * bits // 64
    fields, steps = 16 // bits, min(16 // bits, block_k // 16)
    strips, blocks = codes.shape[0] // STRIP, codes.shape[1] // block_k
    # Axes: strip, half of the strip (n), g, block, unit, step (s), half of the step (k), t, half of a word.
    places = codes.view(strips, 2, 8, blocks, -1, steps, 2, 4, 2)
    n, s, k, half = 1, 5, 6, 8
    shared = {1: (half, k, n, s), 2: (k, half, n, s)}.get(words, (n, k, half, s))
    places = places.permute(0, 3, 4, 2, 7, *shared).reshape(strips, blocks, -1, fields)
    halves = torch.zeros(places.shape[:-1], dtype=torch.int16, device=codes.device)
    for field in range(fields):
        halves |= places[..., field].to(torch.int16) << (bits * field)
    return halves.view(torch.int32)


def pack_int8(codes: Tensor, center: int, block_k: int) -> Tensor:
    """Codes uint8 [N, K] less `center` -> int8 [strips, blocks, bytes a tile], as an INT8 product wants them.

    There a lane has inputs 4 t .. 4 t + 3 and 4 t + 16 .. 4 t + 19 of every 32.
    """
    strips, blocks = codes.shape[0] // STRIP, codes.shape[1] // block_k
    centred = (codes.to(torch.int16) - center).to(torch.int8)
    # Axes: strip, half of the strip, g, block, step of 32, half of the step, t, byte.
    places = centred.view(strips, 2, 8, blocks, block_k // 32, 2, 4, 4)
    return places.permute(0, 3, 4, 2, 6, 1, 5, 7).reshape(strips, blocks, -1)


def _headers(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Scales or offsets float32 [N, G] -> [G, N padded to strips], in fp16 where that loses nothing.

    Nothing that counts, that is: where activations are 16-bit floats, scales may be too, but what is out of
    fp16's range stays float32.
    """
    half = values.half()
    exact = torch.equal(half.float(), values)
    magnitude = values.abs()
    normal = bool(((magnitude == 0) | ((magnitude >= 2.0**-14) & (magnitude <= 65504))).all())
    kept = half if exact or (normal and dtype != torch.float32) else values
    return functional.pad(kept.T, (0, -kept.shape[0] % STRIP)).contiguous()


def _pad_groups(columns: Tensor, group: int, padded_group: int, value: int) -> Tensor:
    """[..., K] -> [..., groups * padded_group], each group (the last may be short) filled up with `value`."""
    filled = functional.pad(columns, (0, -columns.shape[-1] % group), value=value)
    groups = filled.view(*columns.shape[:-1], -1, group)
    return functional.pad(groups, (0, padded_group - group), value=value).flatten(-2)


def _index(perm: Tensor | None, k: int, group: int, padded_group: int, device: torch.device) -> Tensor | None:
    """The input of each packed column, -1 for padding; None if that is each column's own number."""
    if perm is None and group == padded_group and k % group == 0:
        return None
    order = torch.arange(k, device=device) if perm is None else perm.to(device)
    return _pad_groups(order.to(torch.int32), group, padded_group, -1)
