"""What the daemon tells of itself: requests, engines and memory as plain data. No HTTP, no clients' text."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from quantd.daemon.activity import Progress, RequestRecord
from quantd.daemon.loaded_model import ModelEntry
from quantd.engine.messages import RequestStats, Stats

Phase = Literal["loading", "preparing", "grammar", "waiting", "prefill", "decode", "sending"]


class RequestStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A request under way. phase: its model loads; its prompt is made; its grammar is compiled; it waits for
    its turn; its prompt is computed; its answer is; all is computed and not all taken.

    why: it waits, in words. computed_tokens: of prompt_tokens, cached ones included. tokens_per_second: of
    the answer, since its first token.
    """

    id: str
    client: dict[str, Any]
    route: str
    model: str | None
    phase: Phase
    why: str | None
    seconds: float
    choices: int
    prompt_tokens: int
    computed_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_second: float | None


def request_statuses(
    records: Iterable[RequestRecord], stats: Mapping[str, Stats], reasons: Mapping[str, str]
) -> list[RequestStatus]:
    """How far each is, by what engines told in detail. reasons: see quantd.daemon.waits."""
    inside = {request.id: request for engine in stats.values() for request in engine.requests}
    return [_request_status(record, inside, reasons) for record in records]


def _request_status(
    record: RequestRecord, inside: Mapping[str, RequestStats], reasons: Mapping[str, str]
) -> RequestStatus:
    works = record.works
    phase = _phase(record, inside)
    peer = record.peer
    return RequestStatus(
        id=record.id,
        client={
            "name": peer.name,
            "id": record.client,
            "pid": peer.pid,
            "address": peer.address,
            "agent": peer.agent,
        },
        route=record.route or record.target,
        model=record.model,
        phase=phase,
        why=_why(record, phase, reasons),
        seconds=time.monotonic() - record.started,
        choices=len(works),
        prompt_tokens=sum(work.prompt_len for work in works),
        computed_tokens=sum(_num_computed(work, inside.get(work.id)) for work in works),
        cached_tokens=sum(work.num_cached or 0 for work in works),
        output_tokens=sum(work.num_tokens for work in works),
        tokens_per_second=_rate(works),
    )


def _why(record: RequestRecord, phase: Phase, reasons: Mapping[str, str]) -> str | None:
    if phase == "loading":
        return reasons.get(record.model or "")
    waits = [reasons[work.id] for work in record.works if work.id in reasons]
    return waits[0] if waits and phase == "waiting" else None


def _phase(record: RequestRecord, inside: Mapping[str, RequestStats]) -> Phase:
    """That of its choice that is farthest."""
    if record.loaded is None:
        return "loading"
    going = [work for work in record.works if work.reason is None]
    if not going:
        return "sending" if record.works else "preparing"
    if any(work.num_tokens for work in going):
        return "decode"
    queues = {inside[work.id].queue for work in going if work.id in inside}
    if "running" in queues or not queues:
        return "prefill"
    return "waiting" if "waiting" in queues else "grammar"


def _num_computed(work: Progress, state: RequestStats | None) -> int:
    if work.num_tokens or work.reason is not None:
        return work.prompt_len
    return (work.num_cached or 0) if state is None else min(state.num_computed, work.prompt_len)


def _rate(works: Sequence[Progress]) -> float | None:
    """Tokens of all choices after the first ones, over the time in which they came."""
    timed = [work for work in works if work.first is not None and work.decode_seconds]
    if not timed:
        return None
    seconds = max(work.latest for work in timed) - min(work.first or 0.0 for work in timed)
    return sum(work.num_tokens - 1 for work in timed) / seconds


def model_status(entry: ModelEntry, stats: Stats | None) -> dict[str, Any]:
    """A model in memory or on its way. pool: how much of each part of its KV pool is held and cached."""
    done, total = entry.progress
    model = entry.model
    left = math.inf if model is None else model.keep_alive.seconds_left
    counters = None if stats is None else msgspec.structs.asdict(stats)
    if counters is not None:
        del counters["requests"], counters["pool"]
    return {
        "name": entry.name,
        "state": entry.state,
        "progress": {"done": done, "total": total},
        "info": None if model is None else msgspec.structs.asdict(model.engine.info),
        "stats": counters,
        "pool": None if stats is None else stats.pool,
        "memory_bytes": None if model is None else resident_bytes(model.engine.pid),
        "unloads_in": left if math.isfinite(left) else None,
    }


def memory_status() -> dict[str, int | None]:
    """Of the daemon's own process and the machine, in bytes; None where Linux does not tell."""
    machine = _machine_memory()
    return {
        "daemon_bytes": resident_bytes(os.getpid()),
        "total_bytes": machine.get("MemTotal"),
        "available_bytes": machine.get("MemAvailable"),
    }


def resident_bytes(pid: int) -> int | None:
    """Memory of a process (proc_pid_statm(5)); None for one that is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def _machine_memory() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in fields if len(words) == 3}
