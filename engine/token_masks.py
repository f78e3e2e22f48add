"""Which tokens may come next, for the requests of a step that may not have all: found while it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from quantd.engine.grammar import bit_row, num_words
from quantd.engine.plan import RequestState


class Masks(NamedTuple):
    """bits: int32 [R, W], a BitRow for each request of a step, of set bits where any token may come.

    None where that is so for all. errors: why a request cannot go on, by its id.
    """

    bits: npt.NDArray[np.int32] | None = None
    errors: Mapping[str, str] = {}


NO_MASKS = Masks()


class TokenMasks:
    """Finds masks on a thread of its own. A request's mask depends on its parameters and output alone."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = num_words(vocab_size)
        self._thread = ThreadPoolExecutor(1, "masks")
        self._nothing: Future[Masks] = Future()
        self._nothing.set_result(NO_MASKS)

    def start(self, requests: Sequence[RequestState]) -> Future[Masks]:
        """Begin with the masks of requests whose outputs stay as they are until these are there."""
        if not any(state.is_held for state in requests):
            return self._nothing
        return self._thread.submit(self._find, requests)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    def _find(self, requests: Sequence[RequestState]) -> Masks:
        matchers = {i: state.matcher for i, state in enumerate(requests) if state.matcher is not None}
        for i, matcher in matchers.items():
            matcher.follow(requests[i].output)
        width = max([self._num_words, *(matcher.num_words for matcher in matchers.values())])
        bits = np.full((len(requests), width), -1, np.int32)
        if matchers:
            fill_next_token_bitmask_par(self._executor, [(m.core, i) for i, m in matchers.items()], bits)
        results = {requests[i].id: matcher.finish(bits[i]) for i, matcher in matchers.items()}
        for row, state in zip(bits, requests, strict=True):
            if (forced := state.forced) is not None:
                row[:] = bit_row([forced], width)
        return Masks(bits, {id: error for id, error in results.items() if error is not None})
