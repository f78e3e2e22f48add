"""A line of JSON for each request that is over, in a file that only its owner reads.

Prompts are in it only where they were asked for. A thread of its own writes, so that a slow or full disk
holds nobody up: what cannot be written is dropped, and told once. Several daemons may share a file.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, Full, Queue
from typing import Any

import msgspec

from quantd.daemon.activity import CLIENT_LEFT, Progress, RequestRecord

_log = logging.getLogger(__name__)

MAX_BYTES = 10 * 2**20
NUM_OLD = 3
"""Files of this size that are kept beside the present one: PATH.1 is the latest."""

_MAX_WAITING = 10_000
_CLOSE_SECONDS = 2.0
_LOOKS = ("GET ", "HEAD ", "OPTIONS ")


class RequestLog:
    """Appends to `path`; at max_bytes the file becomes PATH.1, and so on up to PATH.num_old."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, num_old: int = NUM_OLD) -> None:
        self._file = _RotatedFile(path, max_bytes, num_old)
        self._waiting: Queue[RequestRecord | None] = Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="request-log", daemon=True)
        self._thread.start()

    def add(self, record: RequestRecord) -> None:
        """Have a line written, unless the request only looked at something and succeeded. Never waits."""
        if record.target.startswith(_LOOKS) and (record.status or 0) < 400 and not record.works:
            return
        try:
            self._waiting.put_nowait(record)
        except Full:
            self._file.note_lost(1)

    def close(self) -> None:
        """Write what waits, for a while at most."""
        try:
            self._waiting.put(None, timeout=_CLOSE_SECONDS)
        except Full:
            return
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        going = True
        while going:
            records = list(self._take())
            lines = [msgspec.json.encode(entry(record)) + b"\n" for record in records if record is not None]
            self._file.append(lines)
            going = None not in records
        self._file.close()

    def _take(self) -> Iterator[RequestRecord | None]:
        """All that waits; the first of it is waited for."""
        yield self._waiting.get()
        while True:
            try:
                yield self._waiting.get_nowait()
            except Empty:
                return


def entry(record: RequestRecord) -> dict[str, Any]:
    """A request as it stands in the log. Seconds: of its choice that took longest; null where not known."""
    works, peer = record.works, record.peer
    fields: dict[str, Any] = {
        "time": datetime.fromtimestamp(record.received, UTC).isoformat(timespec="milliseconds"),
        "id": record.id,
        "client": record.client,
        "program": peer.name,
        "pid": peer.pid,
        "address": peer.address,
        "agent": peer.agent,
        "route": record.route or record.target,
        "model": record.model,
        "status": record.status,
        "end": _end(record),
        "error": record.error or next((work.error for work in works if work.error is not None), None),
        "choices": len(works),
        "prompt_tokens": sum(work.prompt_len for work in works),
        "cached_tokens": sum(work.num_cached or 0 for work in works),
        "output_tokens": sum(work.num_tokens for work in works),
        "load_seconds": None if record.loaded is None else _rounded(record.loaded - record.started),
        "queue_seconds": _longest(works, lambda work: _between(work.started, work.admitted)),
        "prefill_seconds": _longest(works, lambda work: _between(work.admitted, work.first)),
        "decode_seconds": _longest(works, lambda work: work.decode_seconds),
        "first_token_seconds": _longest(works, lambda work: _between(record.started, work.first)),
        "total_seconds": _rounded(record.ended - record.started),
    }
    return fields | ({"prompts": record.prompts} if record.prompts else {})


def _end(record: RequestRecord) -> str:
    """The reasons of its choices, each once; without any, whether it was done, refused or left."""
    reasons = dict.fromkeys(work.reason for work in record.works if work.reason is not None)
    if reasons:
        return ",".join(reasons)
    if record.status is None or record.status == CLIENT_LEFT:
        return "abort"
    return "error" if record.status >= 400 else "done"


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(end - start, 0.0)


def _longest(works: Sequence[Progress], seconds: Callable[[Progress], float | None]) -> float | None:
    known = [value for value in map(seconds, works) if value is not None]
    return _rounded(max(known)) if known else None


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


class _RotatedFile:
    """Lines appended whole or not at all, under a lock that other daemons take too."""

    def __init__(self, path: Path, max_bytes: int, num_old: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._num_old = num_old
        self._fd: int | None = None
        self._num_lost = 0

    def append(self, lines: Sequence[bytes]) -> None:
        """Write these; one that cannot be written is lost."""
        for line in lines:
            try:
                self._append(line)
            except OSError as error:
                if not self._num_lost:
                    _log.warning("%s: lines are left out: %s", self._path, error.strerror or error)
                self.note_lost(1)
            else:
                self._tell_lost()

    def _tell_lost(self) -> None:
        if self._num_lost:
            _log.warning("%s goes on, without %d lines", self._path, self._num_lost)
            self._num_lost = 0

    def note_lost(self, count: int) -> None:
        """Count lines that were not written."""
        self._num_lost += count

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _append(self, line: bytes) -> None:
        fd = self._locked(len(line))
        size = os.fstat(fd).st_size
        try:
            while line:
                line = line[os.write(fd, line) :]
        except OSError:
            os.ftruncate(fd, size)
            raise
        finally:
            fcntl.flock(fd, fcntl.LOCK_UN)

    def _locked(self, num_bytes: int) -> int:
        """The present file, which has room or is empty. Others may rotate it until it is locked."""
        while True:
            fd = self._open()
            fcntl.flock(fd, fcntl.LOCK_EX)
            if self._is_present(fd):
                size = os.fstat(fd).st_size
                if not size or size + num_bytes <= self._max_bytes:
                    return fd
                self._rotate()
            self.close()

    def _open(self) -> int:
        if self._fd is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        return self._fd

    def _is_present(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), self._path.stat())
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        for number in range(self._num_old - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                self._old(number).replace(self._old(number + 1))
        self._path.replace(self._old(1))

    def _old(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
