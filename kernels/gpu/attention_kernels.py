"""The kernels of attention over the block pool: prefill, decode and what lies between, in any mix.

The rows of a dot are pairs of a token and a query head of one key/value head, so heads that share keys
read them once. A context is cut into splits of fixed length, counted from position 0. A split's sums start
from nothing, and splits are added up in order, by the program that walks them all or, where they are
shared among programs, by a second kernel. Both do the same arithmetic in the same order, and a token that
a row does not see adds exact zeros, so a row's bits hang on its own tokens alone.

What else that takes: maxima are rounded up to whole numbers, so scaling by 2 to their differences is exact;
and the sums of weights come from a dot with ones, whose order no tile shape changes.

Codes are INT8 and meet the dots as fp16, which holds them exactly: the scale of a key multiplies its
score, that of a value its weight. (Flash-decoding: Dao et al. 2023; paging: arXiv 2309.06180.)
"""

from __future__ import annotations

import triton
import triton.language as tl

# A maximum where nothing was seen: finite, so that differences are, and 2 to them is 0 or 1.
_NOTHING = tl.constexpr(-(2.0**100))
# Lifts weight * scale of value out of fp16's smallest numbers; values up to 65504 stay below its largest.
_LIFT = tl.constexpr(64.0)
# Requests looked at, and partial results fetched, at a time.
_REQUESTS = tl.constexpr(64)
_PARTS = tl.constexpr(4)
# What changes from step to step, and must not make triton compile anew for a 1 or a multiple of 16.
_COUNTS = (
    "num_requests",
    "table_width",
    "min_len",
    "max_len",
    "first_split",
    "num_splits",
    "splits_per_program",
)
INDICES = ("positions", "query_start", "block_tables")


@triton.jit
def _find(query_start, num_requests, tile, min_len, max_len, GROUP: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Whose the tile'th tile is, among those of requests with min_len to max_len tokens.

    Gives the request (num_requests: there is no such tile), which of its tiles it is, and how many tokens
    the requests before it have.
    """
    request = 0
    tokens_before = 0
    tiles_before = 0
    tiles_so_far = 0
    for first in range(0, num_requests, _REQUESTS):
        r = first + tl.arange(0, _REQUESTS)
        start = tl.load(query_start + r, mask=r < num_requests, other=0)
        stop = tl.load(query_start + r + 1, mask=r < num_requests, other=0)
        tokens = stop - start
        tokens = tl.where((tokens >= min_len) & (tokens <= max_len), tokens, 0)
        tiles = (tokens * GROUP + TILE_ROWS - 1) // TILE_ROWS
        before = (tiles_so_far + tl.cumsum(tiles, 0) <= tile) & (r < num_requests)
        request += tl.sum(before.to(tl.int32), 0)
        tokens_before += tl.sum(tl.where(before, tokens, 0), 0)
        tiles_before += tl.sum(tl.where(before, tiles, 0), 0)
        tiles_so_far += tl.sum(tiles, 0)
    return request, tile - tiles_before, tokens_before


@triton.jit
def _half(bits):
    """fp16 of an INT8 code from the low 16 bits: (code + 128) with 1024's exponent, which is its sum."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def _two_halves(words):
    """The codes in bytes 0 and 2 of each word as fp16 [..., 2]."""
    lifted = (words & 0x00FF00FF) ^ 0x64806480
    return tl.join(_half(lifted), _half(lifted >> 16))


@triton.jit
def _unpack_keys(words, TOKENS: tl.constexpr, DIM: tl.constexpr):
    """Four INT8 codes of each word as fp16 [TOKENS, DIM], in the order that `_as_keys` gives queries.

    A lane of a tensor-core product has elements 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of every 16: in this order
    they are those of a word, and the words of several 16 lie side by side, so that codes are unpacked where
    they are multiplied.
    """
    STEPS: tl.constexpr = 4 if DIM >= 64 else DIM // 16
    codes = tl.join(_two_halves(words), _two_halves(words >> 8))
    # Axes: token, words of four lanes, t, step, half of a word, byte of a half.
    codes = codes.reshape(TOKENS, DIM // (16 * STEPS), 4, STEPS, 2, 2)
    return codes.permute(0, 1, 3, 5, 2, 4).reshape(TOKENS, DIM)


@triton.jit
def _as_keys(x, ROWS: tl.constexpr, DIM: tl.constexpr):
    """x [ROWS, DIM] in the order of `_unpack_keys`."""
    STEPS: tl.constexpr = 4 if DIM >= 64 else DIM // 16
    x = x.reshape(ROWS, DIM // (16 * STEPS), 4, STEPS, 2, 2)
    return x.permute(0, 1, 3, 5, 2, 4).reshape(ROWS, DIM)


@triton.jit
def _unpack_values(words, TOKENS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """Four INT8 codes of each word as fp16 [TOKENS, DIM], in an order that `_from_values` undoes.

    PAIRS: for a tensor-core product. There a lane has element g of tokens 2 t, 2 t + 1, 2 t + 8 and 2 t + 9,
    and tokens 2 t and 2 t + 1 share a register: words of both are brought together first.
    """
    if not PAIRS:
        return _unpack_keys(words, TOKENS, DIM)
    LANES: tl.constexpr = 8 if DIM >= 32 else 4
    STEPS: tl.constexpr = 4 if DIM >= 128 else DIM // (4 * LANES)
    even, odd = words.reshape(TOKENS // 2, 2, DIM // 4).permute(0, 2, 1).split()
    low = (even & 0xFFFF) | (odd << 16)
    high = ((even >> 16) & 0xFFFF) | (odd & -0x10000)
    low = tl.join(_two_halves(low), _two_halves(low >> 8))
    high = tl.join(_two_halves(high), _two_halves(high >> 8))
    codes = tl.join(low, high)
    # Axes: pair of tokens, words of eight lanes, g, step, token, byte of a half, half of a word.
    codes = codes.reshape(TOKENS // 2, DIM // (4 * LANES * STEPS), LANES, STEPS, 2, 2, 2)
    return codes.permute(0, 4, 6, 5, 1, 3, 2).reshape(TOKENS, DIM)


@triton.jit
def _from_values(x, ROWS: tl.constexpr, DIM: tl.constexpr, PAIRS: tl.constexpr):
    """x [ROWS, DIM] of the order of `_unpack_values` in that of a head."""
    if not PAIRS:
        KEY_STEPS: tl.constexpr = 4 if DIM >= 64 else DIM // 16
        x = x.reshape(ROWS, DIM // (16 * KEY_STEPS), KEY_STEPS, 2, 4, 2)
        return x.permute(0, 1, 4, 2, 5, 3).reshape(ROWS, DIM)
    LANES: tl.constexpr = 8 if DIM >= 32 else 4
    STEPS: tl.constexpr = 4 if DIM >= 128 else DIM // (4 * LANES)
    x = x.reshape(ROWS, 2, 2, DIM // (4 * LANES * STEPS), STEPS, LANES)
    return x.permute(0, 3, 5, 4, 1, 2).reshape(ROWS, DIM)


@triton.jit
def _load_tile(
    k,
    v,
    k_scale,
    v_scale,
    block_table,
    token,
    is_token,
    scale,
    block_stride,
    scale_block_stride,
    TOKEN_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    INT8: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Keys and values [tokens, DIM] of one head, and what multiplies scores and, INT8, weights."""
    PACK: tl.constexpr = 4 if INT8 else 1
    block = tl.load(block_table + token // BLOCK_SIZE, mask=is_token, other=0).to(tl.int64)
    word = tl.arange(0, DIM // PACK)
    at = (block * block_stride + token % BLOCK_SIZE * TOKEN_STRIDE)[:, None] + word[None, :]
    is_word = is_token[:, None] & (word < HEAD_DIM // PACK)[None, :]
    keys = tl.load(k + at, mask=is_word, other=0)
    values = tl.load(v + at, mask=is_word, other=0)
    key_scale, value_scale = scale, scale
    if INT8:
        at_scale = block * scale_block_stride + token % BLOCK_SIZE
        key_scale = (tl.load(k_scale + at_scale, mask=is_token, other=0.0) * scale)[None, :]
        value_scale = (tl.load(v_scale + at_scale, mask=is_token, other=0.0) * _LIFT)[None, :]
        keys = _unpack_keys(keys, token.shape[0], DIM)
        values = _unpack_values(values, token.shape[0], DIM, PAIRS)
    return keys, values, key_scale, value_scale


@triton.jit
def _sees(position, token, window, HAS_WINDOW: tl.constexpr):
    seen = token <= position
    if HAS_WINDOW:
        seen = seen & (token > position - window)
    return seen


@triton.jit
def _oldest(position, is_row, window, HAS_WINDOW: tl.constexpr):
    """The first token that any row sees."""
    oldest = 0
    if HAS_WINDOW:
        first = tl.min(tl.where(is_row, position, tl.max(position, 0)), 0)
        oldest = tl.maximum(first - window + 1, 0)
    return oldest


@triton.jit
def _no_sums(ROWS: tl.constexpr, DIM: tl.constexpr):
    """Of rows that have seen nothing: top, total and mixed, see _add_tile."""
    top = tl.full([ROWS], _NOTHING, tl.float32)
    return top, tl.zeros([ROWS, 16], tl.float32), tl.zeros([ROWS, DIM], tl.float32)


@triton.jit
def _add_tile(
    queries,
    keys,
    values,
    key_scale,
    value_scale,
    is_seen,
    softcap,
    top,
    total,
    mixed,
    HAS_SOFTCAP: tl.constexpr,
    INT8: tl.constexpr,
):
    """Add a tile of tokens to the sums of rows.

    top [rows]: of the scores so far, in base 2 logarithms. total [rows, 16]: of the weights
    2^(score - top), in every column. mixed [rows, DIM]: of weight * value.
    """
    dtype = queries.dtype
    scores = tl.dot(queries, tl.trans(keys.to(dtype)), input_precision="ieee") * key_scale
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp2(tl.minimum(scores, 64.0)) + 1.0))  # tanh
    scores = tl.where(is_seen, scores, float("-inf"))
    new_top = tl.maximum(top, tl.ceil(tl.max(scores, 1)))
    shrink = tl.exp2(top - new_top)[:, None]
    weights = tl.exp2(scores - new_top[:, None])
    ones = tl.full([values.shape[0], 16], 1.0, dtype)
    total = tl.dot(weights.to(dtype), ones, total * shrink, input_precision="ieee")
    if INT8:
        weights = tl.where(is_seen, weights * value_scale, 0.0)
    mixed = tl.dot(weights.to(dtype), values.to(dtype), mixed * shrink, input_precision="ieee")
    return new_top, total, mixed


@triton.jit
def _level(top, other):
    """The larger of two maxima, and what brings sums below each of them to it: powers of two."""
    new = tl.maximum(top, other)
    return new, tl.exp2(top - new), tl.exp2(other - new)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=INDICES)
def attention_kernel(
    q,
    out,
    partial,
    partial_sums,
    k,
    v,
    k_scale,
    v_scale,
    positions,
    query_start,
    block_tables,
    num_requests,
    table_width,
    min_len,
    max_len,
    first_split,
    num_splits,
    splits_per_program,
    num_kv_heads,
    block_stride,
    scale_block_stride,
    scale,
    softcap,
    window,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    SCALE_HEAD_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_LEN: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    DOT: tl.constexpr,
    INT8: tl.constexpr,
    PAIRS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    DIRECT: tl.constexpr,
):
    """Grid (tiles, key/value heads, programs along a context).

    k, v: INT8: words of four codes, with k_scale and v_scale; else floats, without. Strides count them. scale
    takes a dot to a base 2 logarithm, or HAS_SOFTCAP to that of e^2x, x what tanh is taken of; softcap: in
    base 2 logarithms. DIRECT: out is written. Else partial [rows, heads, 1 + num_splits, HEAD_DIM] and
    partial_sums [rows, heads, 1 + num_splits, 2 (top, total)] are, but for the first of every 1 + num_splits.
    """
    # The last tiles of a prefill have most to do, so they begin first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0) if DIRECT else tl.program_id(0)
    request, tile, tokens_before = _find(query_start, num_requests, tile, min_len, max_len, GROUP, TILE_ROWS)
    if request == num_requests:
        return
    first_token = tl.load(query_start + request)
    num_tokens = tl.load(query_start + request + 1) - first_token
    row = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    query = row // GROUP
    is_row = query < num_tokens
    position = tl.load(positions + first_token + query, mask=is_row, other=-1)

    oldest, newest = _oldest(position, is_row, window, HAS_WINDOW), tl.max(position, 0)
    own = tl.program_id(2) * splits_per_program
    start = tl.maximum((first_split + own) * SPLIT_LEN, oldest // TILE_LEN * TILE_LEN)
    stop = (first_split + tl.minimum(own + splits_per_program, num_splits)) * SPLIT_LEN
    stop = tl.minimum(stop, newest + 1)
    if start >= stop:
        return

    kv_head = tl.program_id(1)
    head = (query * num_kv_heads + kv_head) * GROUP + row % GROUP  # of the request's tokens x heads
    d = tl.arange(0, DIM)
    at_row = (first_token * num_kv_heads * GROUP + head)[:, None] * HEAD_DIM + d[None, :]
    is_element = is_row[:, None] & (d < HEAD_DIM)[None, :]
    queries = tl.load(q + at_row, mask=is_element, other=0.0).to(DOT)
    k += kv_head * HEAD_STRIDE
    v += kv_head * HEAD_STRIDE
    if INT8:
        queries = _as_keys(queries, TILE_ROWS, DIM)
        k_scale += kv_head * SCALE_HEAD_STRIDE
        v_scale += kv_head * SCALE_HEAD_STRIDE

    top, total, mixed = _no_sums(TILE_ROWS, DIM)
    if DIRECT:
        all_top, all_total, all_mixed = _no_sums(TILE_ROWS, DIM)
    for first in range(start, stop, TILE_LEN):
        token = first + tl.arange(0, TILE_LEN)
        is_token = (token < stop) & (token >= oldest)
        keys, values, key_scale, value_scale = _load_tile(
            k, v, k_scale, v_scale, block_tables + request * table_width, token, is_token, scale,
            block_stride, scale_block_stride, TOKEN_STRIDE, BLOCK_SIZE, HEAD_DIM, DIM, INT8, PAIRS,
        )  # fmt: skip
        is_seen = _sees(position[:, None], token[None, :], window, HAS_WINDOW)
        top, total, mixed = _add_tile(
            queries,
            keys,
            values,
            key_scale,
            value_scale,
            is_seen,
            softcap,
            top,
            total,
            mixed,
            HAS_SOFTCAP,
            INT8,
        )
        if ((first + TILE_LEN) % SPLIT_LEN == 0) | (first + TILE_LEN >= stop):
            if DIRECT:
                all_top, shrink, part = _level(all_top, top)
                all_total = all_total * shrink[:, None] + total * part[:, None]
                all_mixed = all_mixed * shrink[:, None] + mixed * part[:, None]
            else:
                slot = (tokens_before * num_kv_heads * GROUP + head) * (num_splits + 1)
                slot += first // SPLIT_LEN - first_split + 1
                part = _from_values(mixed, TILE_ROWS, DIM, PAIRS) if INT8 else mixed
                tl.store(partial + slot[:, None] * HEAD_DIM + d[None, :], part, mask=is_element)
                tl.store(partial_sums + slot * 2, top, mask=is_row)
                tl.store(partial_sums + slot * 2 + 1, tl.max(total, 1), mask=is_row)
            top, total, mixed = _no_sums(TILE_ROWS, DIM)
    if DIRECT:
        result = all_mixed / tl.where(is_row, tl.max(all_total, 1), 1.0)[:, None]
        if INT8:
            result = _from_values(result * (1 / _LIFT), TILE_ROWS, DIM, PAIRS)
        tl.store(out + at_row, result.to(out.dtype.element_ty), mask=is_element)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=INDICES)
def merge_kernel(
    out,
    partial,
    partial_sums,
    positions,
    query_start,
    num_requests,
    min_len,
    max_len,
    first_split,
    num_splits,
    window,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    INT8: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    """Grid (rows, heads). Add up a row's partial results in order, of those splits that it sees.

    Of several calls, each for num_splits splits, the first of every 1 + num_splits partial results carries
    what the calls before have added up.
    """
    request, query, _ = _find(query_start, num_requests, tl.program_id(0), min_len, max_len, 1, 1)
    if request == num_requests:
        return
    token = tl.load(query_start + request) + query
    position = tl.load(positions + token)
    start = 1
    stop = tl.minimum(position // SPLIT_LEN - first_split + 1, num_splits) + 1
    if HAS_WINDOW:
        start = tl.maximum(start, (position - window + 1) // SPLIT_LEN - first_split + 1)
    d = tl.arange(0, DIM)
    first_slot = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * (num_splits + 1)
    one = tl.arange(0, 1)
    sums = partial_sums + first_slot * 2 + one
    parts = partial + first_slot * HEAD_DIM

    if IS_FIRST:
        top = tl.full([1], _NOTHING, tl.float32)
        total = tl.zeros([1], tl.float32)
        mixed = tl.zeros([DIM], tl.float32)
    else:
        top = tl.load(sums)
        total = tl.load(sums + 1)
        mixed = tl.load(parts + d, mask=d < HEAD_DIM, other=0.0)
    for first in range(start, stop, _PARTS):
        for i in tl.static_range(_PARTS):
            slot = first + i
            width = tl.where(slot < stop, HEAD_DIM, 0)
            part_top = tl.load(sums + slot * 2, mask=one < width, other=_NOTHING)
            part_total = tl.load(sums + slot * 2 + 1, mask=one < width, other=0.0)
            part_mixed = tl.load(parts + slot * HEAD_DIM + d, mask=d < width, other=0.0)
            top, shrink, part = _level(top, part_top)
            total = total * shrink + part_total * part
            mixed = mixed * shrink + part_mixed * part
    if IS_LAST:
        result = mixed / total
        if INT8:
            result *= 1 / _LIFT
        at = (token * tl.num_programs(1) + tl.program_id(1)) * HEAD_DIM + d
        tl.store(out + at, result.to(out.dtype.element_ty), mask=d < HEAD_DIM)
    else:
        tl.store(parts + d, mixed, mask=d < HEAD_DIM)
        tl.store(sums, top)
        tl.store(sums + 1, total)
