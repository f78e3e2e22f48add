"""Why requests wait, in words: for their model, or in the queue of its engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec

from quantd.daemon.loaded_model import ModelEntry
from quantd.engine.messages import Stats

_HEAD = {
    "blocks": "waits for KV blocks: {free} of {total} are free, {running} requests run",
    "seat": "behind {running} running requests, as many as may run at a time (max_num_requests)",
    "tokens": "behind the prompts of {running} running requests",
    "": "begins with the next step",
}


class Wait(msgspec.Struct, frozen=True):
    """A request that waits. id: the engine's, None where it has not got so far."""

    id: str | None
    seconds: float
    why: str


def waits_of(entry: ModelEntry, stats: Stats | None) -> list[Wait]:
    """The requests of one model that wait, the first in the queue first."""
    now = time.monotonic()
    waits = [Wait(None, now - since, loading(entry)) for since in entry.waiting]
    if entry.model is not None:
        for place, (id, seconds) in enumerate(entry.model.engine.unbegun):
            waits.append(Wait(id, seconds, _queued(place, stats or Stats())))
    return waits


def reasons(entries: Iterable[ModelEntry], stats: Mapping[str, Stats]) -> dict[str, str]:
    """Why engine requests wait, by id; and why those do that want a model which loads, by its name."""
    found = {entry.name: loading(entry) for entry in entries if entry.model is None}
    for entry in entries:
        found |= {wait.id: wait.why for wait in waits_of(entry, stats.get(entry.name)) if wait.id is not None}
    return found


def loading(entry: ModelEntry) -> str:
    """Why a model is not in memory yet."""
    done, total = entry.progress
    return entry.note or f"{entry.name} is loading" + (f", {100 * done // total} %" if total else "")


def _queued(place: int, stats: Stats) -> str:
    if place:
        return f"behind {place} waiting and {stats.num_running} running requests"
    free = stats.blocks_free + stats.blocks_cached
    return _HEAD[stats.waits_for].format(free=free, total=stats.blocks_total, running=stats.num_running)
