"""Bit streams, zero points and act-order: from packed words to the one runtime layout. Knows no files.

Field orders and zero-point conventions are those of AutoGPTQ and GPTQModel (GPTQ), AutoAWQ (AWQ) and
compressed-tensors; every fix-up is done here, once, at load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from quantd.kernels.weights import QuantizedWeight

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of a word holds column AWQ_ORDER[i] of its eight


def stream_words(count: int, bits: int) -> int:
    """int32 words that hold `count` codes of `bits` bits in a dense stream."""
    return -(-count * bits // 32)


def split_fields(words: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """Integers [..., W] -> uint8 [..., W * len(order)]: field i of a word, lowest first, goes to order[i]."""
    mask = 2**bits - 1
    fields = torch.empty((*words.shape, len(order)), dtype=torch.uint8)
    for i, place in enumerate(order):
        # An arithmetic shift of a negative word is harmless: the mask drops the sign's copies.
        fields[..., place] = (words >> (bits * i)) & mask
    return fields.flatten(-2)


def unpack_stream(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [..., W], a little-endian bit stream with code j from bit j * bits up -> uint8 [..., count].

    GPTQ of any width (its 3-bit codes straddle words) and recent compressed-tensors.
    """
    octets = words.contiguous().view(torch.uint8)
    unit = math.lcm(bits, 8) // 8  # the fewest whole bytes that hold whole codes
    if unit > 1:
        octets = torch.nn.functional.pad(octets, (0, -octets.shape[-1] % unit))
        parts = [octets[..., i::unit].to(torch.int64) << (8 * i) for i in range(unit)]
        octets = torch.stack(parts).sum(0)
    fields = split_fields(octets, bits, tuple(range(unit * 8 // bits)))
    return fields[..., :count].contiguous()


def unpack_padded(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [..., W] with 32 // bits codes a word and the rest of its bits unused -> uint8 [..., count].

    Differs from `unpack_stream` only at widths that do not divide 32 (older compressed-tensors).
    """
    return split_fields(words, bits, tuple(range(32 // bits)))[..., :count].contiguous()


def padded_words(count: int, bits: int) -> int:
    """int32 words that hold `count` codes with 32 // bits of them a word."""
    return -(-count // (32 // bits))


class Packing(NamedTuple):
    """One way to pack codes into int32 words along the last axis."""

    words: Callable[[int, int], int]
    unpack: Callable[[Tensor, int, int], Tensor]


DENSE = Packing(stream_words, unpack_stream)
PADDED = Packing(padded_words, unpack_padded)


def uniform_zero(stored: Tensor, bits: int) -> int | None:
    """1 where every stored zero point is the symmetric one of the v1 convention, 2 of v2, else None."""
    first = int(stored.flatten()[0])
    version = {2 ** (bits - 1) - 1: 1, 2 ** (bits - 1): 2}.get(first)
    return version if version is not None and bool((stored == first).all()) else None


def decode_zeros(stored: Tensor, bits: int, version: int) -> Tensor:
    """Stored zero points -> zero points, uint8. v1 stores z - 1, wrapping within the field; v2 stores z."""
    return (stored + 1) & (2**bits - 1) if version == 1 else stored


def affine(scale: Tensor, zeros: Tensor | int) -> tuple[Tensor, Tensor]:
    """(scale, offset) float32 of scale * (code - zero); exact, as 11-bit scales times 8-bit zeros are."""
    scale = scale.to(torch.float32).contiguous()
    return scale, -(scale * zeros)


def group(
    codes: Tensor,
    scale_offset: tuple[Tensor, Tensor],
    bits: int,
    group_size: int,
    g_idx: Tensor | None = None,
    input_bits: int | None = None,
) -> QuantizedWeight:
    """Codes uint8 [N, K] in input order, scale and offset [N, G] -> the runtime layout.

    group_size: inputs a group, G = ceil(K / group_size) of them. g_idx: [K] in 0..G-1, the group of each
    input (None: consecutive ones); columns are then sorted by group, stably. Groups of unequal size become
    runs of equal size that share a scale.
    """
    scale, offset = scale_offset
    k = codes.shape[1]
    group_size = min(group_size, k)
    if g_idx is None or torch.equal(g_idx.long(), torch.arange(k) // group_size):
        return QuantizedWeight(codes, scale, offset, bits, group_size, input_bits=input_bits)
    ordered, perm = torch.sort(g_idx.long(), stable=True)
    size = _run_length(ordered)
    runs = ordered[::size]
    identity = torch.equal(perm, torch.arange(k))
    return QuantizedWeight(
        codes if identity else codes[:, perm],
        scale[:, runs].contiguous(),
        offset[:, runs].contiguous(),
        bits,
        size,
        perm=None if identity else perm,
        input_bits=input_bits,
    )


def _run_length(ordered: Tensor) -> int:
    """The largest run such that no run of sorted group numbers spans two groups (the last may be short)."""
    borders = torch.nonzero(ordered[1:] != ordered[:-1]).flatten() + 1
    return math.gcd(*borders.tolist()) or ordered.numel()
