"""Who asks for what at present, and how far it is: a record for each client's request.

A record is open until its HTTP exchange and all the work that it asked for are over; work in the background
outlasts the exchange. Knows no HTTP, and no text of anybody's.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from quantd.daemon.errors import RequestCancelledError, RequestNotFoundError
from quantd.engine.request import Request, TokenEvent

CLIENT_LEFT = 499
"""nginx's status of a request whose client closed the connection; only the daemon itself sees it."""

_MAX_TEXT_LEN = 300

_Result = TypeVar("_Result")


def new_request_id() -> str:
    """A name for a request and its answer."""
    return f"req_{uuid.uuid4().hex}"


def printable(text: str) -> str:
    """A line of what clients may have chosen: it ends up in logs and on terminals."""
    return "".join(c for c in " ".join(text[:_MAX_TEXT_LEN].split()) if c.isprintable())


@dataclass(frozen=True)
class Peer:
    """Who is at the other end. address: over TCP; pid, program: over a Unix socket. agent: as it says."""

    address: str | None = None
    pid: int | None = None
    program: str | None = None
    agent: str | None = None

    @property
    def name(self) -> str:
        """In a word: the program, which nobody can feign, else what it calls itself."""
        product = (self.agent or "").split("/")[0].split(" ")[0]
        return self.program or product or self.address or "unknown"


class Observer(Protocol):
    """Is told of an engine request as it goes on, before the request's own numbers change."""

    def admitted(self, work: Progress) -> None:
        """It got its turn; num_cached is known."""

    def tokens(self, work: Progress, count: int, now: float) -> None:
        """So many tokens came."""

    def ended(self, work: Progress) -> None:
        """It is over."""


class Progress:
    """How far one engine request is, and when it got there; times of time.monotonic.

    admitted: when it got its first step. first, latest: when its first and its latest tokens came.
    num_cached: None until it is told. reason: why it ended, at the time `ended`, and error in words if it was
    one; None while it goes on.
    """

    def __init__(self, request: Request, observer: Observer) -> None:
        self.id = request.id
        self.prompt_len = len(request.prompt)
        self.num_cached: int | None = None
        self.num_tokens = 0
        self.started = self.latest = self.ended = time.monotonic()
        self.admitted: float | None = None
        self.first: float | None = None
        self.reason: str | None = None
        self.error: str | None = None
        self._observer = observer

    def note(self, event: TokenEvent) -> None:
        """Take in what a step did."""
        if event.num_cached is not None and self.num_cached is None:
            self.num_cached, self.admitted = event.num_cached, event.admitted
            self._observer.admitted(self)
        count = len(event.token_ids)
        if not count and event.finish_reason is None:
            return
        now = time.monotonic()
        if count:
            self._observer.tokens(self, count, now)
            self.num_tokens += count
        self.latest = now
        self.first = now if self.first is None else self.first

    def end(self, reason: str, error: str | None = None) -> None:
        """Note why no more is to come."""
        self.reason, self.ended = reason, time.monotonic()
        self.error = None if error is None else printable(error)
        self._observer.ended(self)

    @property
    def prompt_seconds(self) -> float:
        """Until the first token, or until now."""
        return (time.monotonic() if self.first is None else self.first) - self.started

    @property
    def decode_seconds(self) -> float:
        """From the first token to the latest."""
        return 0.0 if self.first is None else self.latest - self.first


def _no_reason() -> str:
    return ""


class RequestRecord:
    """One request of a client's.

    client: whose it is, as quantd.daemon.access tells them apart, once that is known. route: method and path
    as in the table of routes, if they are there; target: as the client wrote them. received: seconds since
    the epoch; started, loaded, ended: of time.monotonic. loaded: when its model was in memory; None before.
    why: tells what keeps it waiting for that, in words, or nothing.
    works: the engine requests made of it. status, error: how its HTTP exchange ended. prompts: their text,
    where it is to be logged. on_end: called when all is over.
    """

    def __init__(
        self,
        id: str,
        peer: Peer,
        route: str = "",
        target: str = "",
        on_end: Sequence[Callable[[RequestRecord], None]] = (),
    ) -> None:
        self.id = id
        self.peer = peer
        self.route = route
        self.target = target
        self.received = time.time()
        self.started = self.ended = time.monotonic()
        self.client: str | None = None
        self.model: str | None = None
        self.loaded: float | None = None
        self.why: Callable[[], str] = _no_reason
        self.works: list[Progress] = []
        self.status: int | None = None
        self.error: str | None = None
        self.prompts: list[str] = []
        self._on_end = on_end
        self._num_holders = 1
        self._is_cancelled = False
        self._on_cancel: list[Callable[[], object]] = []

    def begin(self, request: Request, observer: Observer) -> Progress:
        """Note that an engine gets this request."""
        progress = Progress(request, observer)
        self.works.append(progress)
        return progress

    def got_model(self, name: str) -> None:
        """Note that its model is in memory."""
        self.model, self.loaded, self.why = name, time.monotonic(), _no_reason

    def cancel(self) -> None:
        """End what is done for it; whoever waits for that gets a RequestCancelledError."""
        self._is_cancelled = True
        for end in self._on_cancel:
            end()

    def on_cancel(self, end: Callable[[], object]) -> None:
        """Have this called by a `cancel`; now, if there was one."""
        self._on_cancel.append(end)
        if self._is_cancelled:
            end()

    async def unless_cancelled(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """The outcome of some work, which a `cancel` ends. Raises RequestCancelledError then."""
        task = asyncio.create_task(work)
        self.on_cancel(task.cancel)
        try:
            return await task
        except asyncio.CancelledError:
            this = asyncio.current_task()
            if self._is_cancelled and this is not None and not this.cancelling():
                raise cancelled() from None
            raise

    @property
    def is_over(self) -> bool:
        return not self._num_holders

    def hold(self) -> None:
        """Keep it open until `release`."""
        assert not self.is_over, f"request {self.id} is over"
        self._num_holders += 1

    def release(self) -> None:
        """One holder less; without any it is over."""
        self._num_holders -= 1
        if self.is_over:
            self.ended = time.monotonic()
            for told in self._on_end:
                told(self)
            # Timers that the request set have its context, and so this record, for as long as they run.
            self._on_cancel.clear()


def cancelled() -> RequestCancelledError:
    """What a cancelled request's client is told."""
    return RequestCancelledError(
        "the request was cancelled in the daemon: on its page, by quantd cancel or POST /quantd/cancel"
    )


# Handlers, parsers and formats of five dialects lie between who makes a record and who fills it in, and
# none of them has a use for it. A task has the request in whose course it was started.
_CURRENT: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)


def current_request_id() -> str:
    """The name of the request that is being answered, or a new one."""
    record = _CURRENT.get()
    return new_request_id() if record is None else record.id


def hold_current() -> Callable[[], None]:
    """Keep the request that is being answered open until the function returned is called."""
    record = _CURRENT.get()
    if record is None or record.is_over:
        return lambda: None
    record.hold()
    return record.release


def current_wait() -> str:
    """What the request that is being answered waits for, in a line, if that is known."""
    record = _CURRENT.get()
    return "" if record is None else printable(record.why())


def note_error(message: str) -> None:
    """The request that is being answered is refused, or fails, for this reason."""
    record = _CURRENT.get()
    if record is not None:
        record.error = printable(message)


class Activity:
    """The requests under way that want something of a model. on_end: who is told of each that is over.

    keeps_prompts: whether their text is kept until then.
    """

    def __init__(self) -> None:
        self._open: dict[RequestRecord, None] = {}
        self.keeps_prompts = False
        self.on_end: list[Callable[[RequestRecord], None]] = [self._close]

    @property
    def requests(self) -> Sequence[RequestRecord]:
        """Those open, the oldest first."""
        return list(self._open)

    def cancel(self, id: str) -> None:
        """End the requests of this name, which may be several. Raises RequestNotFoundError."""
        found = [record for record in self._open if record.id == id]
        if not found:
            raise RequestNotFoundError(f"no request {id!r} is under way; quantd cancel lists those that are")
        for record in found:
            record.cancel()

    @contextmanager
    def follow(self, id: str, peer: Peer, route: str, target: str) -> Iterator[RequestRecord]:
        """The block is the HTTP exchange of a request."""
        record = RequestRecord(id, peer, route, target, self.on_end)
        token = _CURRENT.set(record)
        try:
            yield record
        finally:
            _CURRENT.reset(token)
            record.release()

    def join(self, model: str | None, client: str) -> RequestRecord:
        """The request being answered, held from now on, which wants a model; a new one where none is."""
        record = _CURRENT.get()
        if record is None or record.is_over:
            record = RequestRecord(new_request_id(), Peer(), on_end=self.on_end)
        else:
            record.hold()
        record.client, record.model = client, record.model or (model and printable(model))
        self._open[record] = None
        return record

    def _close(self, record: RequestRecord) -> None:
        self._open.pop(record, None)
