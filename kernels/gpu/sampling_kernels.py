"""The kernels of sampling: see quantd.kernels.gpu.sampling for what they do together.

Grids are (rows, chunks) but for edits and the last merge. WORDS: int32 words of the mask a row, 0 for none.
CHUNKS: of a row, and SLOTS: that number up to a power of two. What is found lies in tables: `stats` float32
[R, 5, CHUNKS] and `named` int32 [R, 2, CHUNKS], tokens; `goals` float32 [R, 3], what top_k and top_p keep
and the largest logit; for each search `prefix` int32 [9, R], the bits known at the start of each pass, and
`sums` float32 [2, R, 2, CHUNKS, 16], counts and weights of this pass and the one before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from quantd.kernels.gpu.sampling_inputs import Status
from quantd.kernels.shortlist import GREEDY_BELOW

NUM_STATS = 5
NUM_PASSES = 8  # of four bits each; one more measures the value found

_COLDEST = tl.constexpr(GREEDY_BELOW)
_NOT_FINITE = tl.constexpr(int(Status.NOT_FINITE))
_NOTHING_ALLOWED = tl.constexpr(int(Status.NOTHING_ALLOWED))
_LAST = tl.constexpr(NUM_PASSES)
_INF = tl.constexpr(float("inf"))
_PEAK, _TOTAL, _BEST, _WEIGHT, _PICK = (tl.constexpr(i) for i in range(5))
_STATS = tl.constexpr(NUM_STATS)
_BEST_ID, _PICK_ID = tl.constexpr(0), tl.constexpr(1)
# Of a search's table, and of what searches go for: top_k counts, top_p weighs.
_COUNTS, _WEIGHTS = tl.constexpr(0), tl.constexpr(1)
_FOR_K, _FOR_P, _FOR_BEST = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _penalized(x, divisor, taken):
    return tl.where(x < 0, x * divisor, tl.div_rn(x, divisor)) - taken


@triton.jit
def edit_kernel(
    logits,
    drawn,
    start,
    ids,
    added,
    divisor,
    taken,
    taken_again,
    place,
    repetition,
    taken_once,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Change single logits in place; a program for BLOCK edits of a row.

    The row's token in `drawn` is one of the edits, or the program does it whose edits are next below it.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    begin, end = tl.load(start + row) + block * BLOCK, tl.load(start + row + 1)
    at = tl.load(place + row)
    last = tl.load(drawn + at, mask=at >= 0, other=-1)
    by_last = tl.load(repetition + row)

    edit = begin + tl.arange(0, BLOCK)
    inside = edit < end
    token = tl.load(ids + edit, mask=inside, other=VOCAB)
    again = token == last
    by = tl.where(again, by_last, tl.load(divisor + edit, mask=inside, other=1.0))
    once = tl.load(taken + edit, mask=inside, other=0.0)
    less = tl.where(again, tl.load(taken_again + edit, mask=inside, other=0.0), once)
    row_logits = logits + row * VOCAB
    x = tl.load(row_logits + token, mask=inside, other=0.0) + tl.load(added + edit, mask=inside, other=0.0)
    tl.store(row_logits + token, _penalized(x, by, less), mask=inside)

    lowest = tl.where(block == 0, 0, tl.load(ids + begin, mask=begin < end, other=VOCAB))
    behind = tl.load(ids + begin + BLOCK, mask=begin + BLOCK < end, other=VOCAB)
    is_new = (last >= lowest) & (last < behind) & (tl.sum(again.to(tl.int32), 0) == 0)
    x = tl.load(row_logits + last, mask=is_new, other=0.0)
    tl.store(row_logits + last, _penalized(x, by_last, tl.load(taken_once + row)), mask=is_new)


@triton.jit
def _allowed_logits(logits, mask, row, ids, VOCAB: tl.constexpr, WORDS: tl.constexpr):
    """logits[row, ids], -inf outside and where the mask (none with WORDS 0) forbids."""
    x = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=-_INF)
    if WORDS > 0:
        words = tl.load(mask + row * WORDS + ids // 32, mask=ids < VOCAB, other=0)
        x = tl.where(((words >> (ids % 32)) & 1) != 0, x, -_INF)
    return x


@triton.jit
def _temperature(temperature, row):
    """The row's; 1 for a greedy one, which has no use for it."""
    value = tl.load(temperature + row)
    return tl.where(value < _COLDEST, 1.0, value)


@triton.jit
def _stat(stats, row, which, other, SLOTS: tl.constexpr, CHUNKS: tl.constexpr):
    """[SLOTS]: what each chunk of a row found, `other` behind the last."""
    slot = tl.arange(0, SLOTS)
    return tl.load(stats + (row * _STATS + which) * CHUNKS + slot, mask=slot < CHUNKS, other=other)


@triton.jit
def survey_kernel(
    logits,
    adjusted,
    mask,
    temperature,
    stats,
    named,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Each chunk's extremes and sums of exponentials: of the logits as they came, and of those adjusted."""
    row = tl.program_id(0).to(tl.int64)
    chunk, chunks = tl.program_id(1), tl.num_programs(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    raw = tl.load(logits + row * VOCAB + ids, mask=ids < VOCAB, other=-_INF)
    faults = tl.sum(((tl.abs(raw) < _INF) == (ids >= VOCAB)).to(tl.int32), 0)
    peak = tl.max(raw, 0)
    total = tl.where(faults > 0, float("nan"), tl.sum(tl.exp(raw - peak), 0))
    x = _allowed_logits(adjusted, mask, row, ids, VOCAB, WORDS)
    best, best_at = tl.max(x, 0, return_indices=True)
    weight = tl.sum(tl.exp((x - best) / _temperature(temperature, row)), 0)
    at = stats + row * _STATS * chunks + chunk
    tl.store(at + _PEAK * chunks, peak)
    tl.store(at + _TOTAL * chunks, total)
    tl.store(at + _BEST * chunks, best)
    tl.store(at + _WEIGHT * chunks, tl.where(best > -_INF, weight, 0.0))
    tl.store(named + (row * 2 + _BEST_ID) * chunks + chunk, chunk * CHUNK + best_at)


@triton.jit
def _key(x):
    """Unsigned integers that are in order as the floats are; 0.0 and -0.0 are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -(2**31))).to(tl.uint32, bitcast=True)


@triton.jit
def _float_of(key):
    """The inverse of _key."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -(2**31))).to(tl.float32, bitcast=True)


@triton.jit
def _reached(sums, row, parity, kind, CHUNKS: tl.constexpr, SLOTS: tl.constexpr):
    """[SLOTS, 16]: count or weight of what each chunk has at or above each of a pass's 16 values."""
    slot, value = tl.arange(0, SLOTS)[:, None], tl.arange(0, 16)[None, :]
    table = sums + ((parity * tl.num_programs(0) + row) * 2 + kind) * CHUNKS * 16
    return tl.load(table + slot * 16 + value, mask=slot < CHUNKS, other=0.0)


@triton.jit
def _value_of(sums, row, value, kind, CHUNKS: tl.constexpr, SLOTS: tl.constexpr):
    """[SLOTS]: a column of the last pass's table, 0 for what is at or above the value found, 1 for above."""
    columns = tl.arange(0, 16)[None, :]
    table = _reached(sums, row, _LAST % 2, kind, CHUNKS, SLOTS)
    return tl.sum(tl.where(columns == value, table, 0.0), 1)


@triton.jit
def _found(prefix, row):
    """The key that a search has found."""
    return tl.load(prefix + _LAST * tl.num_programs(0) + row).to(tl.uint32, bitcast=True)


@triton.jit
def _narrowed(prefix, sums, row, step, goal, KIND: tl.constexpr, CHUNKS: tl.constexpr, SLOTS: tl.constexpr):
    """The known leading bits of the key at the start of a pass: four more than in the one before."""
    key = tl.full((), 0, tl.uint32)
    if step > 0:
        totals = tl.sum(_reached(sums, row, (step - 1) % 2, KIND, CHUNKS, SLOTS), 0)
        digit = tl.maximum(tl.sum((totals >= goal).to(tl.int32), 0) - 1, 0)
        known = tl.load(prefix + (step - 1) * tl.num_programs(0) + row)
        key = (known | (digit << (32 - 4 * step))).to(tl.uint32, bitcast=True)
    return key


@triton.jit
def goal_kernel(
    temperature,
    top_k,
    top_p,
    stats,
    goals,
    k_prefix,
    k_sums,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    CUTS_K: tl.constexpr,
    FOR_P: tl.constexpr,
):
    """A program a row: its largest logit, and what its searches are to reach. Infinite where a cut is off.

    For top_k a count; for top_p (FOR_P, behind the search of top_k) a share, more than none, of what the
    tokens that top_k leaves weigh together.
    """
    row = tl.program_id(0).to(tl.int64)
    bests = _stat(stats, row, _BEST, -_INF, SLOTS, CHUNKS)
    best = tl.max(bests, 0)
    k = tl.load(top_k + row)
    k_goal = tl.where((k > 0) & (k < VOCAB), k.to(tl.float32), _INF)
    if FOR_P:
        heat = _temperature(temperature, row)
        weights = _stat(stats, row, _WEIGHT, 0.0, SLOTS, CHUNKS)
        total = tl.sum(weights * tl.exp((bests - best) / heat), 0)
        if CUTS_K:
            above = tl.sum(_value_of(k_sums, row, 1, _COUNTS, CHUNKS, SLOTS), 0)
            level = tl.exp((_float_of(_found(k_prefix, row)) - best) / heat)
            left = tl.sum(_value_of(k_sums, row, 1, _WEIGHTS, CHUNKS, SLOTS), 0) + (k_goal - above) * level
            total = tl.where(k_goal < _INF, left, total)
        p = tl.load(top_p + row)
        tl.store(goals + row * 3 + _FOR_P, tl.where(p < 1, tl.maximum(p * total, 1e-30), _INF))
    else:
        tl.store(goals + row * 3 + _FOR_BEST, best)
        tl.store(goals + row * 3 + _FOR_K, k_goal)


@triton.jit(do_not_specialize=["step"])
def search_kernel(
    adjusted,
    mask,
    temperature,
    goals,
    prefix,
    sums,
    step,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    FOR_P: tl.constexpr,
):
    """A pass of a search: what a chunk has at or above 16 values. FOR_P: that of top_p, else of top_k."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    key = _narrowed(prefix, sums, row, step, tl.load(goals + row * 3 + FOR_P), FOR_P, CHUNKS, SLOTS)
    if chunk == 0:
        tl.store(prefix + step * tl.num_programs(0) + row, key.to(tl.int32, bitcast=True))
    shift = tl.maximum(28 - 4 * step, 0)
    values = key + (tl.arange(0, 16) << shift).to(tl.uint32, bitcast=True)

    best = tl.load(goals + row * 3 + _FOR_BEST)
    heat = _temperature(temperature, row)
    counts = tl.zeros((TILE, 16), tl.float32)
    weights = tl.zeros((TILE, 16), tl.float32)
    for start in range(0, CHUNK, TILE):
        ids = chunk * CHUNK + start + tl.arange(0, TILE)
        x = _allowed_logits(adjusted, mask, row, ids, VOCAB, WORDS)
        reached = (_key(x)[:, None] >= values[None, :]) & (ids < VOCAB)[:, None]
        counts += tl.where(reached, 1.0, 0.0)
        weights += tl.where(reached, tl.exp((x - best) / heat)[:, None], 0.0)
    table = sums + ((step % 2 * tl.num_programs(0) + row) * 2 * CHUNKS + chunk) * 16 + tl.arange(0, 16)
    tl.store(table + _COUNTS * CHUNKS * 16, tl.sum(counts, 0))
    tl.store(table + _WEIGHTS * CHUNKS * 16, tl.sum(weights, 0))


@triton.jit
def _reaches(
    key,
    prefix,
    sums,
    row,
    chunk,
    level,
    goal,
    KIND: tl.constexpr,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Which tokens of a chunk a search leaves: all above the value found, and the first ones equal to it
    that it takes to reach the goal. level: what one of these adds, by count or weight.
    """
    least = _found(prefix, row)
    above = tl.sum(_value_of(sums, row, 1, KIND, CHUNKS, SLOTS), 0)
    equal = _value_of(sums, row, 0, _COUNTS, CHUNKS, SLOTS) - _value_of(sums, row, 1, _COUNTS, CHUNKS, SLOTS)
    earlier = tl.sum(tl.where(tl.arange(0, SLOTS) < chunk, equal, 0.0), 0)
    is_equal = (key == least).to(tl.int32)
    before = tl.cumsum(is_equal, 0) - is_equal + earlier
    return (key > least) | ((key == least) & (above + before * level < goal))


@triton.jit
def _exponential(seed, position, ids):
    """A number > 0 for each token id, exponentially distributed: -log(1 - u) of a uniform u."""
    bits, _, _, _ = tl.philox(seed, ids.to(tl.uint32), position.to(tl.uint32), 0, 0)
    # The largest u is the float32 below 1; the series is exact where 1 - u would lose what u says.
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return tl.where(u < 2.0**-6, u * (1 + u * (0.5 + u * (1 / 3 + u * 0.25))), -tl.log(1 - u))


@triton.jit
def pick_kernel(
    adjusted,
    mask,
    temperature,
    min_p,
    seed,
    position,
    stats,
    named,
    goals,
    k_prefix,
    k_sums,
    p_prefix,
    p_sums,
    VOCAB: tl.constexpr,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    CUTS_K: tl.constexpr,
    CUTS_P: tl.constexpr,
):
    """The token of a chunk that has the largest noisy logit among those that are left."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _allowed_logits(adjusted, mask, row, ids, VOCAB, WORDS)
    key = _key(x)
    best = tl.load(goals + row * 3 + _FOR_BEST)
    heat = _temperature(temperature, row)
    scaled = (x - best) / heat
    kept = tl.exp(scaled) >= tl.load(min_p + row)
    if CUTS_K:
        goal = tl.load(goals + row * 3 + _FOR_K)
        kept &= _reaches(key, k_prefix, k_sums, row, chunk, 1.0, goal, _COUNTS, CHUNKS, SLOTS)
    if CUTS_P:
        goal = tl.load(goals + row * 3 + _FOR_P)
        level = tl.exp((_float_of(_found(p_prefix, row)) - best) / heat)
        kept &= _reaches(key, p_prefix, p_sums, row, chunk, level, goal, _WEIGHTS, CHUNKS, SLOTS)
    noisy = scaled - tl.log(_exponential(tl.load(seed + row), tl.load(position + row), ids))
    pick, at = tl.max(tl.where(kept, noisy, -_INF), 0, return_indices=True)
    tl.store(stats + (row * _STATS + _PICK) * CHUNKS + chunk, pick)
    tl.store(named + (row * 2 + _PICK_ID) * CHUNKS + chunk, chunk * CHUNK + at)


@triton.jit
def _first_largest(stats, named, row, stat, id_stat, SLOTS: tl.constexpr, CHUNKS: tl.constexpr):
    """The token that the chunk with the largest value names; the earlier chunk among equals."""
    slot = tl.arange(0, SLOTS)
    chunk = tl.argmax(_stat(stats, row, stat, -_INF, SLOTS, CHUNKS), 0)
    tokens = tl.load(named + (row * 2 + id_stat) * CHUNKS + slot, mask=slot < CHUNKS, other=0)
    return tl.sum(tl.where(slot == chunk, tokens, 0), 0)


@triton.jit
def finish_kernel(
    logits,
    temperature,
    stats,
    named,
    token_ids,
    logprobs,
    status,
    VOCAB: tl.constexpr,
    CHUNKS: tl.constexpr,
    SLOTS: tl.constexpr,
    DRAWS: tl.constexpr,
):
    """A program a row: its chunks merged."""
    row = tl.program_id(0).to(tl.int64)
    peaks = _stat(stats, row, _PEAK, -_INF, SLOTS, CHUNKS)
    totals = _stat(stats, row, _TOTAL, 0.0, SLOTS, CHUNKS)
    peak = tl.max(peaks, 0)
    total = tl.sum(totals * tl.exp(peaks - peak), 0)
    best = tl.max(_stat(stats, row, _BEST, -_INF, SLOTS, CHUNKS), 0)
    token = _first_largest(stats, named, row, _BEST, _BEST_ID, SLOTS, CHUNKS)
    if DRAWS:
        drawn = _first_largest(stats, named, row, _PICK, _PICK_ID, SLOTS, CHUNKS)
        token = tl.where(tl.load(temperature + row) < _COLDEST, token, drawn)
    fault = tl.where(best > -_INF, 0, _NOTHING_ALLOWED)
    fault = tl.where(total != total, _NOT_FINITE, fault)
    token = tl.where(fault == 0, token, 0)
    tl.store(token_ids + row, token)
    tl.store(logprobs + row, tl.load(logits + row * VOCAB + token) - peak - tl.log(total))
    tl.store(status + row, fault)
