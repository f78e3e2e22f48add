"""Tiles of a packed weight, as every kernel that reads one takes them; the layout is that of weights.py.

Codes become floats without a conversion instruction: a code's bits, put into the mantissa of a power of two,
are that power plus the code, and one subtraction (exact) leaves the code less its centre. Two codes are
brought out of a word, and subtracted from, at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantd.kernels.gpu.weights import STRIP, Kind

PACKED = tl.constexpr(int(Kind.PACKED))
INT8 = tl.constexpr(int(Kind.INT8))
DENSE = tl.constexpr(int(Kind.DENSE))
_STRIP = tl.constexpr(STRIP)


@triton.jit
def weight_tile(
    low,
    high,
    first_row,
    block,
    N,
    num_blocks,
    KIND: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    CENTER: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Centred codes (or, dense, weights) of BLOCK_N outputs from `first_row` up and of one block of inputs.

    -> DTYPE [BLOCK_N, BLOCK_K]; the compiler sees that a tensor-core product can take it from the registers
    where it is. Outputs past the last repeat it. first_row: a multiple of 16.
    """
    if KIND == DENSE:
        rows = tl.minimum(first_row + tl.arange(0, BLOCK_N), N - 1).to(tl.int64)
        columns = block * BLOCK_K + tl.arange(0, BLOCK_K)
        tile = tl.load(low + (rows * num_blocks * BLOCK_K)[:, None] + columns[None, :]).to(DTYPE)
    elif KIND == INT8:
        tile = _int8_tile(low, first_row, block, N, num_blocks, BLOCK_N, BLOCK_K).to(DTYPE)
    else:
        tile = _plane_tile(low, first_row, block, N, num_blocks, LOW_BITS, 0, CENTER, DTYPE, BLOCK_N, BLOCK_K)
        if HIGH_BITS > 0:
            above = _plane_tile(
                high, first_row, block, N, num_blocks, HIGH_BITS, LOW_BITS, 0, DTYPE, BLOCK_N, BLOCK_K
            )
            tile = (tile.to(tl.float32) + above.to(tl.float32)).to(DTYPE)
    return tile


@triton.jit
def _tile_numbers(first_row, block, N, num_blocks, BLOCK_N: tl.constexpr):
    """Tiles [BLOCK_N / 16] that hold a block of inputs of BLOCK_N outputs."""
    strips = tl.minimum(first_row // _STRIP + tl.arange(0, BLOCK_N // 16), (N - 1) // _STRIP)
    return strips * num_blocks + block


@triton.jit
def _plane_tile(
    plane,
    first_row,
    block,
    N,
    num_blocks,
    BITS: tl.constexpr,
    PLACE: tl.constexpr,
    CENTER: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(field << PLACE) - CENTER of a plane of BITS bits -> DTYPE [BLOCK_N, BLOCK_K]."""
    LANE_WORDS: tl.constexpr = BLOCK_K * BITS // 64
    WORDS: tl.constexpr = LANE_WORDS if LANE_WORDS < 4 else 4  # of a load
    UNITS: tl.constexpr = LANE_WORDS // WORDS
    FIELDS: tl.constexpr = 16 // BITS
    STEPS: tl.constexpr = FIELDS if BLOCK_K // 16 > FIELDS else BLOCK_K // 16  # of 16 inputs, within a unit
    tiles = _tile_numbers(first_row, block, N, num_blocks, BLOCK_N)
    places = tl.arange(0, 32 * LANE_WORDS)
    words = tl.load(plane + tiles[:, None] * (32 * LANE_WORDS) + places[None, :])
    values = _fields(words, BITS, PLACE, CENTER, DTYPE)
    values = values.reshape(
        BLOCK_N // 16,  # strip
        UNITS,
        8,  # g
        4,  # t
        2 if WORDS == 4 else 1,  # half of the strip, among words
        2 if WORDS >= 2 else 1,  # half of the step, among words
        2,  # half of a word
        2 if WORDS == 1 else 1,  # half of the step, among fields
        2 if WORDS <= 2 else 1,  # half of the strip, among fields
        STEPS,
    )
    return values.permute(0, 4, 8, 2, 1, 9, 5, 7, 3, 6).reshape(BLOCK_N, BLOCK_K)


@triton.jit
def _fields(
    words,
    BITS: tl.constexpr,
    PLACE: tl.constexpr,
    CENTER: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """All fields of each half word -> [..., half, the fields in order, as axes of 2]."""
    if BITS == 8:
        fields = _2_fields(words, 0, 1, BITS, PLACE, CENTER, DTYPE)
    elif BITS == 4:
        fields = _4_fields(words, 0, 1, BITS, PLACE, CENTER, DTYPE)
    elif BITS == 2:
        fields = _8_fields(words, 0, 1, BITS, PLACE, CENTER, DTYPE)
    else:
        fields = tl.join(
            _8_fields(words, 0, 2, BITS, PLACE, CENTER, DTYPE),
            _8_fields(words, 1, 2, BITS, PLACE, CENTER, DTYPE),
        )
    return fields


@triton.jit
def _8_fields(
    words,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    PLACE: tl.constexpr,
    CENTER: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Fields FIRST, FIRST + STEP, ..., 8 of them, as in _fields."""
    return tl.join(
        _4_fields(words, FIRST, 2 * STEP, BITS, PLACE, CENTER, DTYPE),
        _4_fields(words, FIRST + STEP, 2 * STEP, BITS, PLACE, CENTER, DTYPE),
    )


@triton.jit
def _4_fields(
    words,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    PLACE: tl.constexpr,
    CENTER: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Fields FIRST, FIRST + STEP, ..., 4 of them, as in _fields."""
    return tl.join(
        _2_fields(words, FIRST, 2 * STEP, BITS, PLACE, CENTER, DTYPE),
        _2_fields(words, FIRST + STEP, 2 * STEP, BITS, PLACE, CENTER, DTYPE),
    )


@triton.jit
def _2_fields(
    words,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    PLACE: tl.constexpr,
    CENTER: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Fields FIRST, FIRST + STEP, ..., 2 of them, as in _fields."""
    return tl.join(
        _field(words, FIRST * BITS, BITS, PLACE, CENTER, DTYPE),
        _field(words, (FIRST + STEP) * BITS, BITS, PLACE, CENTER, DTYPE),
    )


@triton.jit
def _field(
    words,
    AT: tl.constexpr,
    BITS: tl.constexpr,
    PLACE: tl.constexpr,
    CENTER: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The field at bit AT of both halves of each word, less CENTER -> DTYPE [..., half]."""
    return _centred(_picked(words, AT, BITS, PLACE), PLACE + BITS, CENTER, DTYPE)


@triton.jit
def _picked(words, AT: tl.constexpr, BITS: tl.constexpr, PLACE: tl.constexpr):
    """The field at bit AT of both halves of each word, moved to bit PLACE of them."""
    MASK: tl.constexpr = (((1 << BITS) - 1) * 0x10001) << PLACE
    moved = words >> (AT - PLACE) if AT >= PLACE else words << (PLACE - AT)
    return moved & MASK


@triton.jit
def _centred(picked, BITS: tl.constexpr, CENTER: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers of BITS bits in both halves of each word, less CENTER -> DTYPE [..., half]."""
    if tl.float16 == DTYPE:
        field = _less(_halves(picked | 0x64006400, DTYPE), 1024 + CENTER)
    elif tl.bfloat16 == DTYPE and BITS < 8:
        field = _less(_halves(picked | 0x43004300, DTYPE), 128 + CENTER)
    else:
        whole = tl.join(picked & 0xFFFF, picked >> 16) | 0x4B000000
        field = (whole.to(tl.float32, bitcast=True) - (2**23 + CENTER)).to(DTYPE)
    return field


@triton.jit
def _halves(words, DTYPE: tl.constexpr):
    """int32 [...] -> its low and high 16 bits as DTYPE [..., 2]."""
    low, high = words.to(tl.int16), (words >> 16).to(tl.int16)
    return tl.join(low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True))


@triton.jit
def _less(values, amount: tl.constexpr):
    """values - amount, exact here. The compiler makes 16-bit arithmetic of it; the interpreter has none."""
    return (values.to(tl.float32) - amount).to(values.dtype)


@triton.jit
def _int8_tile(plane, first_row, block, N, num_blocks, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """int8 [BLOCK_N, BLOCK_K], 16 bytes a lane for each 32 inputs."""
    tiles = _tile_numbers(first_row, block, N, num_blocks, BLOCK_N)
    codes = tl.load(plane + tiles[:, None] * (16 * BLOCK_K) + tl.arange(0, 16 * BLOCK_K)[None, :])
    # Axes: strip, step, g, t, half of the strip, half of the step, byte.
    codes = codes.reshape(BLOCK_N // 16, BLOCK_K // 32, 8, 4, 2, 2, 4)
    return codes.permute(0, 4, 2, 1, 5, 3, 6).reshape(BLOCK_N, BLOCK_K)


@triton.jit
def step_pairs(
    low,
    high,
    tiles,
    STEP: tl.constexpr,
    LOW_BITS: tl.constexpr,
    HIGH_BITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIPS: tl.constexpr,
):
    """Codes of 16 inputs of tiles [STRIPS], each in the thread that has loaded it: for lane 4 g + t those of
    inputs 2 t and 2 t + 1, of outputs g and of g + 8, then those of inputs 2 t + 8 and 2 t + 9.

    -> four int32 [STRIPS, g, t], a code in each half. Words that several steps ask for are loaded once: the
    compiler sees that it has them.
    """
    first_0, first_1, second_0, second_1 = _plane_pairs(low, tiles, STEP, LOW_BITS, 0, BLOCK_K, STRIPS)
    if HIGH_BITS > 0:
        high_00, high_01, high_10, high_11 = _plane_pairs(
            high, tiles, STEP, HIGH_BITS, LOW_BITS, BLOCK_K, STRIPS
        )
        first_0, first_1 = first_0 | high_00, first_1 | high_01
        second_0, second_1 = second_0 | high_10, second_1 | high_11
    return first_0, first_1, second_0, second_1


@triton.jit
def _plane_pairs(
    plane,
    tiles,
    STEP: tl.constexpr,
    BITS: tl.constexpr,
    PLACE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STRIPS: tl.constexpr,
):
    """The part of `step_pairs` that a plane holds, moved to bit PLACE."""
    LANE_WORDS: tl.constexpr = BLOCK_K * BITS // 64
    WORDS: tl.constexpr = LANE_WORDS if LANE_WORDS < 4 else 4  # of a load
    STEPS: tl.constexpr = 16 // BITS if BLOCK_K // 16 > 16 // BITS else BLOCK_K // 16  # within a unit
    # Where a lane has fewer than four words, fields of one tell halves of the strip, or of the step, apart.
    N_FIELDS: tl.constexpr = 0 if WORDS == 4 else STEPS * BITS
    K_FIELDS: tl.constexpr = 2 * STEPS * BITS if WORDS == 1 else 0
    AT: tl.constexpr = STEP % STEPS * BITS
    lanes = tl.arange(0, 8)[:, None] * 4 + tl.arange(0, 4)[None, :]
    at = plane + tiles[:, None, None] * (32 * LANE_WORDS) + (STEP // STEPS * 32 + lanes) * WORDS
    if WORDS == 1:
        word_00 = tl.load(at)
        word_01, word_10, word_11 = word_00, word_00, word_00
    elif WORDS == 2:
        word_00, word_10 = tl.split(tl.load(at[:, :, :, None] + tl.arange(0, 2)))
        word_01, word_11 = word_00, word_10
    else:
        words = tl.load(at[:, :, :, None] + tl.arange(0, 4))
        first, second = tl.split(words.reshape(STRIPS, 8, 4, 2, 2))
        word_00, word_01 = tl.split(first)
        word_10, word_11 = tl.split(second)
    return (
        _picked(word_00, AT, BITS, PLACE),
        _picked(word_01, AT + N_FIELDS, BITS, PLACE),
        _picked(word_10, AT + K_FIELDS, BITS, PLACE),
        _picked(word_11, AT + K_FIELDS + N_FIELDS, BITS, PLACE),
    )


@triton.jit
def numbers(pairs, BITS: tl.constexpr, CENTER: tl.constexpr, DTYPE: tl.constexpr):
    """The codes of BITS bits in both halves of each word, less CENTER: two float32 of its shape."""
    first, second = tl.split(_centred(pairs, BITS, CENTER, DTYPE))
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def floats(pairs, DTYPE: tl.constexpr):
    """The DTYPE numbers in both halves of each word: two float32 of its shape."""
    first, second = tl.split(_halves(pairs, DTYPE))
    return first.to(tl.float32), second.to(tl.float32)
