"""How a command ends that is told to: by an exception, so that what it has begun is cleared up."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import NoReturn


def end_tidily() -> None:
    """Let SIGTERM and SIGHUP raise SystemExit, with the status that shells have for them.

    One that is ignored stays so, as nohup has it.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
