"""What the routes of quantd's own command line answer, as types."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from quantd.daemon.logs import LogPlace
from quantd.daemon.status import RequestStatus
from quantd.daemon.stored_prefixes import StoredPrefix
from quantd.engine.messages import PoolMap


class Version(TypedDict):
    version: str


class Progress(TypedDict):
    """Bytes of weights."""

    done: int
    total: int


class Waiting(TypedDict):
    """A request that waits. id: the engine's; null where it waits for its model."""

    id: str | None
    seconds: float
    why: str


class Allowance(TypedDict):
    """Bytes that a model to come cannot count on, as others have been promised them; and all it may take."""

    promised: int
    limit: int | None


class ModelStatus(TypedDict):
    """info, stats, pool: of its engine; memory_bytes: of its process.

    unloads_in: seconds, if nothing uses it; null: it stays.
    """

    name: str
    state: Literal["loading", "ready", "unloading"]
    progress: Progress
    info: dict[str, Any] | None
    stats: dict[str, Any] | None
    pool: PoolMap | None
    memory_bytes: int | None
    pinned: bool
    waiting: list[Waiting]
    unloads_in: float | None


class Memory(TypedDict):
    """Of the daemon's own process and of the machine; null where they cannot be seen."""

    daemon_bytes: int | None
    total_bytes: int | None
    available_bytes: int | None


class Status(TypedDict):
    """request_log: a file. stopped: models whose engines died too often, each with the reason."""

    version: str
    pid: int
    uptime_seconds: float
    listening: list[str]
    log: LogPlace
    request_log: str | None
    memory: Memory
    models: list[ModelStatus]
    requests: list[RequestStatus]
    stopped: dict[str, str]
    allowance: Allowance


class LoadLine(TypedDict):
    """A step of a load, or its end, with what is loaded then. why: what the load waits for, if it does."""

    status: Literal["loading", "ready"]
    done: NotRequired[int]
    total: NotRequired[int]
    why: NotRequired[str]
    info: NotRequired[dict[str, Any]]


class Unloaded(TypedDict):
    status: Literal["unloaded"]
    model: str


class Cancelled(TypedDict):
    status: Literal["cancelled"]
    id: str


class Asleep(TypedDict):
    unloaded: list[str]


class Awake(TypedDict):
    status: Literal["awake"]


class Prefixes(TypedDict):
    """See quantd.daemon.stored_prefixes."""

    prefixes: list[StoredPrefix]


class RemovedPrefixes(TypedDict):
    """How many, and of how many bytes."""

    prefixes: int
    bytes: int


class Stopping(TypedDict):
    status: Literal["stopping"]
