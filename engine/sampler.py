"""From logits to tokens, each request by its own SamplingParams and its own random stream.

Rows are worked on one at a time, so a result never depends on who else is in the batch. The order is:
raw log probabilities, masks and penalties, greedy or temperature, top_k, top_p, min_p, draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quantd.engine.errors import NumericsError, RequestError
from quantd.engine.logprobs import Row, TokenIds, largest, token_logprob
from quantd.engine.penalties import adjusted
from quantd.engine.plan import RequestState
from quantd.engine.random_stream import uniform
from quantd.engine.request import SamplingParams, TokenLogprob
from quantd.kernels.errors import QuantdError

GREEDY_BELOW = 1e-5
_CHUNK = 512


class Sample(NamedTuple):
    """A drawn token, and its log probability where asked; or why there is none."""

    token_id: int = -1
    logprob: TokenLogprob | None = None
    error: str | None = None


class Sampler:
    """Draws the next token of each request."""

    def sample(self, logits: Tensor, requests: Sequence[RequestState]) -> list[Sample]:
        """logits: float32 [R, V] on the CPU, row r for requests[r]."""
        return [_sample(row, state) for row, state in zip(logits.numpy(), requests, strict=True)]


def _sample(row: Row, state: RequestState) -> Sample:
    try:
        check_finite(row)
        token_id = _choose(adjusted(row, state), state)
    except QuantdError as error:
        return Sample(error=str(error))
    num_top = state.request.sampling.logprobs
    return Sample(token_id, None if num_top is None else token_logprob(row, token_id, num_top))


def check_finite(row: Row) -> None:
    """Raise NumericsError where a logit is NaN or infinite (either shows in the extremes)."""
    if not (np.isfinite(row.max()) and np.isfinite(row.min())):
        raise NumericsError("the model gave logits that are not finite (NaN or Inf)")


def _choose(row: Row, state: RequestState) -> int:
    best = int(row.argmax())
    if row[best] == -np.inf:
        raise RequestError(
            "min_tokens masks every token: stop_token_ids name the whole vocabulary", "min_tokens"
        )
    params = state.request.sampling
    if params.temperature < GREEDY_BELOW:
        return best
    weights = np.exp((row - row[best]) / np.float32(params.temperature))
    point = uniform(state.seed, len(state.output))
    if params.top_k <= 0 and params.top_p >= 1 and params.min_p <= 0:
        return _draw_from_all(weights, point)
    ids = candidates(weights, params)
    return int(ids[_draw(weights[ids], point)])


def candidates(weights: Row, params: SamplingParams) -> TokenIds:
    """Tokens, ascending, that top_k, then top_p, then min_p leave. weights: e^logit, 1 at most.

    top_k keeps exactly k and top_p the fewest that reach p of what top_k left, never nothing; among
    equals the lower ids stay. min_p keeps what is at least min_p times as likely as the best.
    """
    if 0 < params.top_k < len(weights):
        ids = largest(weights, params.top_k)
        total = weights[ids].sum(dtype=np.float64)
    else:
        total = weights.sum(dtype=np.float64)
        ids = np.flatnonzero(weights >= _floor(len(weights), total, params))
    if params.top_p < 1:
        kept = weights[ids]
        reached = np.cumsum(np.sort(kept)[::-1], dtype=np.float64)
        ids = ids[largest(kept, int(np.searchsorted(reached, params.top_p * total)) + 1)]
    return ids[weights[ids] >= np.float32(params.min_p)]


def _floor(vocab_size: int, total: float, params: SamplingParams) -> float:
    """A weight below which nothing survives, so that few tokens need sorting.

    All tokens lighter than (1 - p) * total / V weigh less than (1 - p) * total together: they lie in
    the tail that top_p cuts off. The factor keeps rounding on the safe side.
    """
    nucleus = 0.999 * (1 - params.top_p) * total / vocab_size
    return max(nucleus, params.min_p)


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
