"""From logits to tokens, each request by its own SamplingParams and its own random stream.

Rows are worked on one at a time, so a result never depends on who else is in the batch. The order is:
raw log probabilities, penalties, masks, greedy or temperature, top_k, top_p, min_p, draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quantd.engine.errors import NumericsError, RequestError
from quantd.engine.logprobs import TokenIds, largest, token_logprob
from quantd.engine.penalties import adjusted
from quantd.engine.plan import RequestState
from quantd.engine.random_stream import uniform
from quantd.engine.request import SamplingParams, TokenLogprob
from quantd.engine.token_masks import NO_MASKS, Masks
from quantd.kernels.errors import QuantdError
from quantd.kernels.shortlist import GREEDY_BELOW, BitRow, Cut, Row, Shortlist, shortlists

Shortlists: TypeAlias = Callable[[Sequence[Row], Sequence[Cut], Sequence[BitRow | None]], list[Shortlist]]

NOT_FINITE = "the model gave logits that are not finite (NaN or Inf)"
NOTHING_ALLOWED = "min_tokens masks every token: stop_token_ids name the whole vocabulary"
_CHUNK = 512


class Sample(NamedTuple):
    """A drawn token, and its log probability where asked; or why there is none."""

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


class Sampler:
    """Draws the next token of each request. shortlists: of the backend that made the logits."""

    def __init__(self, shortlists: Shortlists = shortlists) -> None:
        self._shortlists = shortlists

    def sample(
        self, logits: Tensor, requests: Sequence[RequestState], masks: Masks = NO_MASKS
    ) -> list[Sample]:
        """logits: float32 [R, V] on the CPU, row r for requests[r], as are the masks."""
        raw = list(logits.numpy())
        rows = [adjusted(*one) for one in zip(raw, requests, strict=True)]
        cuts = [cut_of(state.request.sampling, logits.shape[1]) for state in requests]
        lists = self._shortlists(rows, cuts, _bits(masks, requests))
        return [_sample(*one) for one in zip(raw, rows, lists, cuts, requests, strict=True)]


def _bits(masks: Masks, requests: Sequence[RequestState]) -> Sequence[BitRow | None]:
    """The masks of those requests that have one; none at all where nobody has."""
    if masks.bits is None:
        return ()
    return [row if state.is_held else None for row, state in zip(masks.bits, requests, strict=True)]


def cut_of(params: SamplingParams, vocab_size: int) -> Cut:
    """A request's sampling as a backend knows it."""
    if params.temperature < GREEDY_BELOW:
        return Cut(0.0)
    top_k = params.top_k if 0 < params.top_k < vocab_size else 0
    return Cut(params.temperature, top_k, params.top_p, params.min_p)


def _sample(raw: Row, row: Row, short: Shortlist, cut: Cut, state: RequestState) -> Sample:
    try:
        # Masks put infinities of their own into a row.
        if row is not raw or not short.finite:
            check_finite(raw)
        token_id = _choose(short, cut, state)
    except QuantdError as error:
        return Sample(error=str(error))
    num_top = state.request.sampling.logprobs
    return Sample(token_id, None if num_top is None else token_logprob(raw, token_id, num_top))


def check_finite(row: Row) -> None:
    """Raise NumericsError where a logit is NaN or infinite (either shows in the extremes)."""
    if not (np.isfinite(row.max()) and np.isfinite(row.min())):
        raise NumericsError(NOT_FINITE)


def _choose(short: Shortlist, cut: Cut, state: RequestState) -> int:
    if short.largest == -np.inf:
        raise RequestError(NOTHING_ALLOWED, "min_tokens")
    if short.weights is None:
        return short.best
    point = uniform(state.seed, len(state.output))
    if short.ids is None:
        return _draw_from_all(short.weights, point)
    kept = narrowed(short.weights, short.total, cut)
    return int(short.ids[kept[_draw(short.weights[kept], point)]])


def narrowed(weights: Row, total: float, cut: Cut) -> TokenIds:
    """Places in a shortlist, ascending, that top_k, then top_p, then min_p leave.

    top_k keeps exactly k and top_p the fewest that reach p of what top_k left (without it of `total`, the
    whole vocabulary's), never nothing; among equals the lower ids stay. min_p keeps what is at least
    min_p times as likely as the best.
    """
    places = np.arange(len(weights))
    if cut.top_k > 0:
        places = largest(weights, cut.top_k)
        total = float(weights[places].sum(dtype=np.float64))
    if cut.top_p < 1:
        kept = weights[places]
        reached = np.cumsum(np.sort(kept)[::-1], dtype=np.float64)
        places = places[largest(kept, int(np.searchsorted(reached, cut.top_p * total)) + 1)]
    return places[weights[places] >= np.float32(cut.min_p)]


def _draw_from_all(weights: Row, point: float) -> int:
    """_draw, over sums of chunks first: a running sum over a whole vocabulary is slow."""
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _CHUNK), dtype=np.float64)
    ends = np.cumsum(sums)
    chunk = int(np.searchsorted(ends, point * ends[-1], side="right"))
    start = chunk * _CHUNK
    before = ends[chunk - 1] if chunk else 0.0
    within = (point * ends[-1] - before) / sums[chunk]
    return start + _draw(weights[start : start + _CHUNK], within)


def _draw(weights: npt.NDArray[np.float32], point: float) -> int:
    """The index where the running sum passes `point` (in [0, 1)) of the total; never one of weight 0."""
    reached = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(reached, min(point, 1 - 2**-52) * reached[-1], side="right"))
