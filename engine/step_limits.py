"""How much a step may hold: what is configured, and less after memory was found wanting (torch-free)."""

from __future__ import annotations

LEAST_TOKENS = 16
"""A step of so few tokens is not made smaller: it takes little beside what the model itself does."""


class StepLimits:
    """num_tokens: the budget of a step. num_requests: how many may run.

    Each request that runs must get a token of every step, so there are never more of them than tokens.
    """

    def __init__(self, max_num_tokens: int, max_num_requests: int) -> None:
        self.max_num_requests = max_num_requests
        self.num_tokens = max_num_tokens
        self.num_requests = max_num_requests
        self._max_num_tokens = max_num_tokens

    def halve(self, num_tokens: int, num_running: int) -> bool:
        """Allow half of a step that was too large. False, and nothing is done, where that is no less."""
        half = max(num_tokens // 2, LEAST_TOKENS, num_running)
        if half >= num_tokens:
            return False
        self.num_tokens = half
        return True

    def relax(self) -> None:
        """A request has ended: there may be memory for more."""
        self.num_tokens = min(2 * self.num_tokens, self._max_num_tokens)
        self.num_requests = min(self.num_requests + 1, self.max_num_requests)
