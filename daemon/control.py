"""The daemon as a process, as its users ask about it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from quantd.daemon.logs import NOWHERE, LogPlace
from quantd.daemon.models import Models


@dataclass
class Control:
    """Where the daemon keeps what lasts and listens, since when, and the event that ends it.

    num_requests: HTTP requests that are being answered, pulls too. log, request_log: where its
    messages go, and a line for each request, if it is known.
    """

    models: Models
    version: str
    state: Path
    prefixes: Path
    listening: list[str] = field(default_factory=list)
    num_requests: int = 0
    log: LogPlace = NOWHERE
    request_log: Path | None = None
    started: float = field(default_factory=time.monotonic)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
