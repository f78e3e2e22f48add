"""The daemon's own messages: a line for each thing worth knowing, and where those lines go."""

from __future__ import annotations

import logging
import os
import stat
import sys
from pathlib import Path
from typing import Literal

import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from quantd.engine.log_lines import is_read_by_journal, write_to_stderr

_CGROUP = Path("/proc/self/cgroup")


class LogPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where messages go. unit, user: whose journal, where it is one. path: of a file or a terminal."""

    kind: Literal["journal", "file", "terminal", "nowhere"]
    unit: str | None = None
    user: bool = False
    path: str | None = None


NOWHERE = LogPlace("nowhere")


def log_to_stderr() -> LogPlace:
    """Write messages to stderr; where that is."""
    write_to_stderr()
    logging.getLogger("aiohttp.server").addFilter(_tell_bad_http_in_a_line)
    return _place()


def _tell_bad_http_in_a_line(record: logging.LogRecord) -> bool:
    """What a client gets wrong in HTTP itself is no fault of ours, which a trace would look like."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.args, record.exc_info = "not HTTP: %s", (" ".join(str(error).split())[:200],), None
    return True


def _place() -> LogPlace:
    try:
        found = os.fstat(sys.stderr.fileno())
        path = str(Path(f"/proc/self/fd/{sys.stderr.fileno()}").readlink())
    except (OSError, ValueError):  # closed, or not Linux
        return NOWHERE
    if is_read_by_journal():
        unit, user = _own_unit()
        return LogPlace("journal", unit=unit, user=user)
    if stat.S_ISREG(found.st_mode):
        return LogPlace("file", path=path)
    return LogPlace("terminal" if os.isatty(sys.stderr.fileno()) else "nowhere", path=path)


def _own_unit() -> tuple[str | None, bool]:
    """The unit that this process is part of, and whether it is one of a user's manager (systemd.slice(5))."""
    try:
        parts = Path(_CGROUP.read_text().strip().rpartition("::")[2]).parts
    except OSError:
        return None, False
    units = [part for part in parts if part.endswith((".service", ".scope"))]
    is_of_user = any(unit.startswith("user@") for unit in units[:-1])
    return (units[-1] if units else None), is_of_user
