"""What engines have counted, over all the engines that a model has had: it never goes back.

What an engine counted after it was last asked is lost if it is killed; it is asked before it is closed.
"""

from __future__ import annotations

from collections import Counter
from typing import TypeAlias

from quantd.engine.messages import Stats

ENGINE_COUNTERS = ("steps", "computed_tokens", "disk_hits", "preemptions", "evictions")
"""Fields of Stats that only engines know; the rest the daemon counts for itself."""

EngineCounts: TypeAlias = Counter[str]
"""A number for each of ENGINE_COUNTERS."""


class EngineTotals:
    """By model: what its engines that have ended counted, and what the present one did when last asked."""

    def __init__(self) -> None:
        self._ended: dict[str, EngineCounts] = {}
        self._present: dict[str, EngineCounts] = {}

    def note(self, model: str, stats: Stats) -> None:
        """The present engine says this."""
        self._present[model] = Counter({name: getattr(stats, name) for name in ENGINE_COUNTERS})

    def end(self, model: str) -> None:
        """The present engine is no more."""
        present = self._present.pop(model, None)
        if present is not None:
            self._ended[model] = self._ended.get(model, EngineCounts()) + present

    def counts(self) -> dict[str, EngineCounts]:
        """What all engines of each model have counted, as far as is known."""
        models = dict.fromkeys((*self._ended, *self._present))
        return {
            model: self._ended.get(model, EngineCounts()) + self._present.get(model, EngineCounts())
            for model in models
        }
