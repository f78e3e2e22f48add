"""The daemon's own messages: a line for each thing worth knowing, and where those lines go.

No message holds text of a request.
"""

from __future__ import annotations

import logging
import os
import stat
import sys
from pathlib import Path
from typing import Literal

import msgspec
from aiohttp.http_exceptions import HttpProcessingError

from quantd.daemon.supervision import Supervision

# syslog(3); systemd reads them in front of a line (sd-daemon(3)).
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
_CGROUP = Path("/proc/self/cgroup")


class LogPlace(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where messages go. unit, user: whose journal, where it is one. path: of a file or a terminal."""

    kind: Literal["journal", "file", "terminal", "nowhere"]
    unit: str | None = None
    user: bool = False
    path: str | None = None


NOWHERE = LogPlace("nowhere")


def log_to_stderr(supervision: Supervision) -> LogPlace:
    """Write messages to stderr, as who reads there wants them; where that is."""
    place = _place(supervision)
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(_JournalFormatter() if place.kind == "journal" else plain)
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.getLogger("aiohttp.server").addFilter(_tell_bad_http_in_a_line)
    return place


class _JournalFormatter(logging.Formatter):
    """The priority before each line; the journal knows the time itself."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())


def _tell_bad_http_in_a_line(record: logging.LogRecord) -> bool:
    """What a client gets wrong in HTTP itself is no fault of ours, which a trace would look like."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.args, record.exc_info = "not HTTP: %s", (" ".join(str(error).split())[:200],), None
    return True


def _place(supervision: Supervision) -> LogPlace:
    try:
        found = os.fstat(sys.stderr.fileno())
        path = str(Path(f"/proc/self/fd/{sys.stderr.fileno()}").readlink())
    except (OSError, ValueError):  # closed, or not Linux
        return NOWHERE
    if supervision.journal == (found.st_dev, found.st_ino):
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
