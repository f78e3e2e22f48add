"""Which tokens may come next, for the requests of a step that have a grammar: found while it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor
from llguidance.numpy import fill_next_token_bitmask_par

from quantd.engine.plan import RequestState


class Masks(NamedTuple):
    """bits: int32 [R, W], a BitRow for each request of a step, of set bits where it has no grammar.

    None where no request has one. errors: why a request cannot go on, by its id.
    """

    bits: npt.NDArray[np.int32] | None = None
    errors: Mapping[str, str] = {}


NO_MASKS = Masks()


class TokenMasks:
    """Finds masks on a thread of its own. A request's mask depends on its grammar and output alone."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "masks")
        self._nothing: Future[Masks] = Future()
        self._nothing.set_result(NO_MASKS)

    def start(self, requests: Sequence[RequestState]) -> Future[Masks]:
        """Begin with the masks of requests whose outputs stay as they are until these are there."""
        if all(state.matcher is None for state in requests):
            return self._nothing
        return self._thread.submit(self._find, requests)

    @cached_property
    def _executor(self) -> LLExecutor:
        return LLExecutor()

    def _find(self, requests: Sequence[RequestState]) -> Masks:
        matchers = {i: state.matcher for i, state in enumerate(requests) if state.matcher is not None}
        for i, matcher in matchers.items():
            matcher.follow(requests[i].output)
        num_words = max(matcher.num_words for matcher in matchers.values())
        bits = np.full((len(requests), num_words), -1, np.int32)
        fill_next_token_bitmask_par(self._executor, [(m.core, i) for i, m in matchers.items()], bits)
        results = {requests[i].id: matcher.finish(bits[i]) for i, matcher in matchers.items()}
        return Masks(bits, {id: error for id, error in results.items() if error is not None})
