"""The block formats of ggml, decoded exactly into codes with a scale and an offset per group.

Source: ggml-common.h and ggml-quants.c. A row of K values is a run of blocks; each decoder takes the
blocks of a matrix as uint8 [B, bytes] and gives codes uint8 [B, values], scale and offset float32
[B, groups], so that value = scale * code + offset. fp16 scales times small integers are exact in
float32, so these are the very numbers ggml computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
Decoded = tuple[U8, F32, F32]

# Shifts and masks as uint8, so that no step widens.
U1, U2, U3, U4, U15, U48, U63, U128 = map(np.uint8, (1, 2, 3, 4, 15, 48, 63, 128))
EIGHT_BITS = np.arange(8, dtype=np.uint8)[:, None]


@dataclass(frozen=True)
class BlockFormat:
    """One ggml type: `block` values in `nbytes` bytes, `group` values to a scale, codes below 2**bits.

    products: scales are products, more than fp16 can hold. has_minima: offsets are their own, and not the
    middle of the codes' range.
    """

    block: int
    nbytes: int
    group: int
    bits: int
    decode: Callable[[U8], Decoded]
    products: bool = False
    has_minima: bool = False


def _half(blocks: U8, at: int) -> F32:
    """The fp16 at byte `at` of each block, float32 [B, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: U8, run: int) -> U8:
    """Runs of `run` bytes, each the low nibbles of `run` values and then the high ones of the next `run`."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return (runs >> np.array([[0], [4]], np.uint8) & U15).reshape(len(packed), -1)


def _pairs(packed: U8, run: int) -> U8:
    """Runs of `run` bytes, each four times `run` two-bit values, lowest bits first."""
    runs = packed.reshape(len(packed), -1, 1, run)
    return (runs >> np.array([[0], [2], [4], [6]], np.uint8) & U3).reshape(len(packed), -1)


def _fifth_bit(packed: U8) -> U8:
    """Bit j of a little-endian 32-bit word as 16 for value j."""
    return np.unpackbits(packed, axis=1, bitorder="little") << U4


def _q8_0(blocks: U8) -> Decoded:
    scale = _half(blocks, 0)
    return blocks[:, 2:] ^ U128, scale, -128 * scale


def _q4_0(blocks: U8) -> Decoded:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 2:], 16), scale, -8 * scale


def _q4_1(blocks: U8) -> Decoded:
    return _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: U8) -> Decoded:
    scale = _half(blocks, 0)
    return _nibbles(blocks[:, 6:], 16) | _fifth_bit(blocks[:, 2:6]), scale, -16 * scale


def _q5_1(blocks: U8) -> Decoded:
    codes = _nibbles(blocks[:, 8:], 16) | _fifth_bit(blocks[:, 4:8])
    return codes, _half(blocks, 0), _half(blocks, 2)


def _six_bit_pairs(packed: U8) -> tuple[U8, U8]:
    """The eight 6-bit scales and eight 6-bit minima of a Q4_K or Q5_K block from its 12 bytes."""
    low_scale, low_min, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([low_scale & U63, high & U15 | low_scale >> U2 & U48], axis=1)
    minima = np.concatenate([low_min & U63, high >> U4 | low_min >> U2 & U48], axis=1)
    return scales, minima


def _k_scales(blocks: U8) -> tuple[F32, F32]:
    scales, minima = _six_bit_pairs(blocks[:, 4:16])
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q4_k(blocks: U8) -> Decoded:
    return _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: U8) -> Decoded:
    # Byte j of the 32 high-bit bytes holds, in bit g, the fifth bit of value j of group g.
    high = blocks[:, 16:48].reshape(-1, 1, 32) >> EIGHT_BITS & U1
    codes = _nibbles(blocks[:, 48:], 32) | high.reshape(-1, 256) << U4
    return codes, *_k_scales(blocks)


def _q2_k(blocks: U8) -> Decoded:
    packed = blocks[:, :16]
    scale = _half(blocks, 80) * (packed & U15)
    return _pairs(blocks[:, 16:80], 32), scale, -(_half(blocks, 82) * (packed >> U4))


def _q3_k(blocks: U8) -> Decoded:
    low, high = blocks[:, 96:104], blocks[:, 104:108]
    packed = np.concatenate([low & U15, low >> U4], axis=1) | _pairs(high, 4) << U4
    scale = _half(blocks, 108) * (packed.astype(np.int8) - np.int8(32))
    # Byte j of the mask holds, in bit g, the third bit of value j of each run g of 32.
    third = blocks[:, :32].reshape(-1, 1, 32) >> EIGHT_BITS & U1
    return _pairs(blocks[:, 32:96], 32) | third.reshape(-1, 256) << U2, scale, -4 * scale


def _q6_k(blocks: U8) -> Decoded:
    scale = _half(blocks, 208) * np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    codes = _nibbles(blocks[:, :128], 64) | _pairs(blocks[:, 128:192], 32) << U4
    return codes, scale, -32 * scale


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "Q8_0": BlockFormat(32, 34, 32, 8, _q8_0),
    "Q4_0": BlockFormat(32, 18, 32, 4, _q4_0),
    "Q4_1": BlockFormat(32, 20, 32, 4, _q4_1, has_minima=True),
    "Q5_0": BlockFormat(32, 22, 32, 5, _q5_0),
    "Q5_1": BlockFormat(32, 24, 32, 5, _q5_1, has_minima=True),
    "Q2_K": BlockFormat(256, 84, 16, 2, _q2_k, products=True, has_minima=True),
    "Q3_K": BlockFormat(256, 110, 16, 3, _q3_k, products=True),
    "Q4_K": BlockFormat(256, 144, 32, 4, _q4_k, products=True, has_minima=True),
    "Q5_K": BlockFormat(256, 176, 32, 5, _q5_k, products=True, has_minima=True),
    "Q6_K": BlockFormat(256, 210, 16, 6, _q6_k, products=True),
}

# Plain types and their bytes a value.
DENSE_BYTES: dict[str, int] = {"F32": 4, "F16": 2, "BF16": 2}
