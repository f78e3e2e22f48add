"""The messages of a process: lines on stderr, as who reads there wants them.

Imports no torch. No message holds text of a request.
"""

from __future__ import annotations

import logging
import os
import sys

# syslog(3); systemd reads them in front of a line (sd-daemon(3)).
_PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))


def write_to_stderr(message: str = "%(message)s") -> None:
    """Write this process's messages there. message: how they look, without time and level."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter(f"%(asctime)s %(levelname)s {message}", "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(_JournalFormatter(message) if is_read_by_journal() else plain)
    logging.basicConfig(handlers=[handler], level=logging.INFO)


def is_read_by_journal() -> bool:
    """Whether stderr is the stream that systemd's journal reads (systemd.exec(5), $JOURNAL_STREAM)."""
    try:
        stream = os.fstat(sys.stderr.fileno())
    except (OSError, ValueError):  # closed
        return False
    return os.environ.get("JOURNAL_STREAM") == f"{stream.st_dev}:{stream.st_ino}"


class _JournalFormatter(logging.Formatter):
    """The priority before each line; the journal knows the time itself."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        priority = next((number for level, number in _PRIORITIES if record.levelno >= level), 7)
        return "\n".join(f"<{priority}>{line}" for line in super().format(record).splitlines())
