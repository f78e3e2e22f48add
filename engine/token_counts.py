"""Which tokens a request has, and how often each is in its output: what penalties need (torch-free)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int32]


class TokenCounts:
    """Of one request; follows its output, so that a step costs as much as it has new tokens.

    token_ids: distinct, ascending, of prompt and output. counts: how often each of them is in the output.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.token_ids: Counts = np.unique(np.array(prompt, np.int32))
        self.counts: Counts = np.zeros(len(self.token_ids), np.int32)
        self._num_counted = 0

    def follow(self, output: Sequence[int]) -> None:
        """Go on to the end of the output, of which an earlier part may be counted already."""
        for token_id in output[self._num_counted :]:
            place = int(self.token_ids.searchsorted(token_id))
            if place == len(self.token_ids) or self.token_ids[place] != token_id:
                self.token_ids = np.insert(self.token_ids, place, token_id)
                self.counts = np.insert(self.counts, place, 0)
            self.counts[place] += 1
        self._num_counted = len(output)
