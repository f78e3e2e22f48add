"""The tokens that one is drawn from: of a row of logits the few that a request's sampling leaves in play.

Here in numpy, for every backend; one that has the logits at hand may do it where they are made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Row = npt.NDArray[np.float32]
BitRow = npt.NDArray[np.int32]
"""A bit for each token, bit i % 32 of word i // 32: whether it may come next."""

GREEDY_BELOW = 1e-5
"""A temperature that is colder asks for the likeliest token."""


_LEAST_WEIGHT = float(np.finfo(np.float32).smallest_subnormal)


Masks = Sequence[BitRow | None]


class Cut(NamedTuple):
    """What tokens must be to stay. temperature 0: only the likeliest is asked for.

    top_k > 0, less than the vocabulary: among the so many likeliest. top_p < 1: among the likeliest that
    reach it together, which only without top_k cuts here. min_p: at least so many times the best's weight.
    """

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Shortlist(NamedTuple):
    """largest: the largest logit; best: the first token that has it. finite: whether all logits are.

    Of a row with a mask, largest and what follows are of the tokens that it leaves; where it leaves none,
    largest is minus infinity.

    With a temperature: weights e^((logit - largest) / temperature) of `ids` (ascending), or of all tokens
    where that is None; all that `Cut` leaves are among them, and few others. total: of all tokens.
    """

    largest: float
    best: int
    finite: bool
    ids: npt.NDArray[np.integer] | None = None
    weights: Row | None = None
    total: float = 0.0


def shortlists(rows: Sequence[Row], cuts: Sequence[Cut], masks: Masks = ()) -> list[Shortlist]:
    """For each row of logits [V], its cut and its mask. masks: empty where no row has one."""
    triples = zip(rows, cuts, masks or [None] * len(rows), strict=True)
    return [_shortlist(row, cut, mask) for row, cut, mask in triples]


def _shortlist(whole: Row, cut: Cut, mask: BitRow | None) -> Shortlist:
    row = whole if mask is None else _allowed(whole, mask)
    best = int(row.argmax())
    largest = float(row[best])
    finite = math.isfinite(whole.min()) and math.isfinite(largest if mask is None else whole.max())
    if not math.isfinite(largest):
        return Shortlist(largest, best, finite)
    if cut.temperature <= 0:
        return Shortlist(largest, best, finite)
    weights = np.exp((row - row[best]) / np.float32(cut.temperature))
    total = float(weights.sum(dtype=np.float64))
    floor = _floor(weights, total, cut)
    if floor <= 0:
        return Shortlist(largest, best, finite, None, weights, total)
    ids = np.flatnonzero(weights >= floor)
    return Shortlist(largest, best, finite, ids, weights[ids], total)


def _allowed(row: Row, mask: BitRow) -> Row:
    """A copy of the logits with minus infinity for each token whose bit is not set."""
    found = np.unpackbits(mask.view(np.uint8), count=len(row), bitorder="little").view(np.bool_)
    copy = np.full_like(row, -np.inf)
    np.copyto(copy, row, where=found)
    return copy


def _floor(weights: Row, total: float, cut: Cut) -> float:
    """A weight below which nothing stays."""
    if cut.top_k > 0:
        rank = len(weights) - cut.top_k
        # Where fewer weigh anything, a floor of 0 would leave no list, and nothing for top_p to cut.
        return max(float(np.partition(weights, rank)[rank]), _LEAST_WEIGHT)
    return max(tail_share(cut) * total / len(weights), cut.min_p)


def tail_share(cut: Cut) -> float:
    """Tokens lighter than this times the mean weight are in the tail that top_p cuts off.

    All that are lighter than (1 - p) * total / V weigh less than (1 - p) * total together. The factor
    keeps rounding on the safe side.
    """
    return 0.999 * (1 - cut.top_p)
