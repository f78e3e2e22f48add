"""The daemon's async proxy to one engine process: start, generate, stats, close (torch-free).

Knows frames and request ids, not what is in them. All methods belong to the event loop that started it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

import msgspec

from quantd.engine.child import Child
from quantd.engine.config import Allowance, EngineConfig
from quantd.engine.connection import encode_frame, read_frame
from quantd.engine.errors import CapacityError, EngineDiedError, NotBegunError, NumericsError, RequestError
from quantd.engine.messages import (
    Abort,
    Add,
    Drop,
    Events,
    Failed,
    Forget,
    FromEngine,
    GetStats,
    Loading,
    ModelInfo,
    Retry,
    Save,
    Saved,
    Short,
    Started,
    Stats,
    ToEngine,
)
from quantd.engine.request import Request, TokenEvent
from quantd.kernels.errors import QuantdError
from quantd.quant.errors import CheckpointError, UnsupportedModelError

# -P: a file of the working directory must not pass for a module of the engine.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "quantd.engine.loop")
SAVE_SECONDS = 3.0

_LOAD_ERRORS: dict[str, type[QuantdError]] = {
    **{error.__name__: error for error in (CheckpointError, UnsupportedModelError, CapacityError)},
    **{error.__name__: error for error in (NumericsError, RequestError, QuantdError)},
    "MemoryError": CapacityError,
    "OutOfMemoryError": CapacityError,
}

MakeRoom = Callable[[CapacityError], Awaitable[Allowance]]


@dataclass
class _Sent:
    """A request that the engine has. since: on the monotonic clock. begun: it waits no more."""

    inbox: asyncio.Queue[TokenEvent | EngineDiedError] = field(default_factory=asyncio.Queue)
    since: float = field(default_factory=time.monotonic)
    begun: bool = False


class EngineClient:
    """One engine process and its loaded model. `died` resolves to the reason when the process is gone."""

    info: ModelInfo

    def __init__(self, child: Child) -> None:
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._child = child
        self._decoder = msgspec.msgpack.Decoder[FromEngine](FromEngine)
        self._sent: dict[str, _Sent] = {}
        self._asking: deque[asyncio.Future[Stats]] = deque()
        self._saved: asyncio.Future[None] | None = None
        self._saves = False
        self._reading: asyncio.Task[None] | None = None
        self._end_reason: str | None = None
        self._closed = False

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        on_progress: Callable[[int, int], None] | None = None,
        make_room: MakeRoom | None = None,
        *,
        command: Sequence[str] = ENGINE_COMMAND,
        log: int | IO[bytes] | None = None,
    ) -> EngineClient:
        """Start an engine process and wait until it has loaded its model.

        on_progress: called with (bytes loaded, bytes in all). make_room: called with what is wanting, before
        any weight is read, where memory is short; to raise that ends the load. log: a file for what the
        process prints, else stderr. Raises the QuantdError that stopped the load, CapacityError where memory
        ran out, EngineDiedError if the process ended without a reason of its own. No process is left
        behind by an exception or a cancellation.
        """

        async def refuse(error: CapacityError) -> Allowance:
            if error.urgent:
                raise error
            return config.allowance

        client = cls(await Child.start(command, log))
        try:
            client._send(config)
            client.info = await client._wait_until_ready(on_progress, make_room or refuse)
            client._saves = config.prefix_folder is not None and config.disk_cache != 0
        except BaseException:
            await client.close()
            raise
        client._reading = asyncio.create_task(client._read())
        return client

    @property
    def pid(self) -> int:
        """The process id of the engine."""
        return self._child.process.pid

    @property
    def unbegun(self) -> list[tuple[str, float]]:
        """The requests that the engine has not begun, in order, each with the seconds that it has waited."""
        now = time.monotonic()
        return [(id, now - sent.since) for id, sent in self._sent.items() if not sent.begun]

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """The events of a request, the last of which has a finish_reason.

        Closing or cancelling the iterator before that aborts the request. Raises RequestError or
        ContextLengthError at once for what the model can never serve, EngineDiedError, also from the
        iterator, when the process is gone: NotBegunError where it ended by itself before it began with this.
        """
        self.info.check_request(request)
        if self.died.done():
            raise self._death(begun=False)
        return self._generate(request)

    def forget(self, prompt: Sequence[int], salt: str = "") -> None:
        """Let no later request find what the prefix cache has of a prompt. Raises EngineDiedError."""
        self._check_alive()
        self._send(Forget(list(prompt), salt))

    async def drop(self, keys: Sequence[bytes] | None) -> None:
        """Let no later request find these blocks, or any (None); returns when that is so.

        Raises EngineDiedError.
        """
        self._check_alive()
        self._send(Drop(None if keys is None else list(keys)))
        await self.stats()

    async def stats(self, detail: bool = False) -> Stats:
        """The engine's counters, between two of its steps. detail: see GetStats. Raises EngineDiedError."""
        self._check_alive()
        answer: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._asking.append(answer)
        self._send(GetStats(detail))
        return await answer

    def kill(self, reason: str) -> None:
        """End the process by force, whatever it is in the middle of; `died` will tell the reason."""
        if self._end_reason is None:
            self._end_reason = reason
        if self._child.process.returncode is None:
            self._child.process.kill()

    async def close(self) -> None:
        """End the process and wait for its end; running generators raise EngineDiedError. Idempotent.

        What outlives it on disk is written first, for SAVE_SECONDS at most.
        """
        await self._save()
        if self._end_reason is None:
            self._end_reason, self._closed = "the engine was closed", True
        await self._child.end()
        if self._reading is not None:
            await self._reading
        elif not self.died.done():
            self._die(self._end_reason)

    async def _save(self) -> None:
        if not self._saves or self._reading is None or self.died.done() or self._saved is not None:
            return
        self._saved = asyncio.get_running_loop().create_future()
        self._send(Save(SAVE_SECONDS))
        ends: list[asyncio.Future[Any]] = [self._saved, self.died]
        await asyncio.wait(ends, timeout=SAVE_SECONDS, return_when=asyncio.FIRST_COMPLETED)

    async def _wait_until_ready(
        self, on_progress: Callable[[int, int], None] | None, make_room: MakeRoom
    ) -> ModelInfo:
        while True:
            try:
                message = await self._receive()
            except (EOFError, ConnectionError):
                raise EngineDiedError(await self._exit_reason()) from None
            match message:
                case Loading(done, total):
                    if on_progress is not None:
                        on_progress(done, total)
                case Short(shortage, text, urgent, on_gpu):
                    self._send(Retry(await make_room(CapacityError(text, shortage, urgent, on_gpu))))
                case ModelInfo():
                    return message
                case Failed(kind, text):
                    raise _LOAD_ERRORS.get(kind, EngineDiedError)(text)

    async def _generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        assert request.id not in self._sent, f"request {request.id} is here already"
        if self.died.done():
            raise self._death(begun=False)
        sent = self._sent[request.id] = _Sent()
        self._send(Add(request))
        finished = False
        try:
            while not finished:
                event = await sent.inbox.get()
                if isinstance(event, EngineDiedError):
                    raise event
                finished = event.finish_reason is not None
                yield event
        finally:
            del self._sent[request.id]
            if not finished and not self.died.done():
                self._send(Abort(request.id))

    def _check_alive(self) -> None:
        if self.died.done():
            raise EngineDiedError(self.died.result())

    def _death(self, begun: bool) -> EngineDiedError:
        kind = EngineDiedError if begun or self._closed else NotBegunError
        return kind(self.died.result())

    def _send(self, message: EngineConfig | ToEngine) -> None:
        self._child.writer.write(encode_frame(message))

    async def _receive(self) -> FromEngine:
        return self._decoder.decode(await read_frame(self._child.reader))

    async def _read(self) -> None:
        """Hand out what the engine sends, until it sends no more."""
        try:
            while True:
                self._handle(await self._receive())
        except (EOFError, ConnectionError, msgspec.MsgspecError):
            reason = self._end_reason or await self._exit_reason()
            self._child.writer.close()
            self._die(reason)

    def _handle(self, message: FromEngine) -> None:
        match message:
            case Events(events):
                for event in events:
                    if event.request_id in self._sent:
                        self._sent[event.request_id].inbox.put_nowait(event)
            case Started(request_ids):
                for sent in filter(None, map(self._sent.get, request_ids)):
                    sent.begun = True
            case Stats():
                self._answer(message)
            case Saved():
                if self._saved is not None and not self._saved.done():
                    self._saved.set_result(None)
            case Failed(_, text):
                self._end_reason = f"the engine process failed: {text}"
            case _:
                raise AssertionError(f"the engine sent {message} after it was ready")

    def _answer(self, stats: Stats) -> None:
        answer = self._asking.popleft()
        if not answer.done():
            answer.set_result(stats)

    def _die(self, reason: str) -> None:
        self.died.set_result(reason)
        for sent in self._sent.values():
            sent.inbox.put_nowait(self._death(sent.begun))
        for answer in self._asking:
            if not answer.done():
                answer.set_exception(EngineDiedError(reason))

    async def _exit_reason(self) -> str:
        status = await self._child.end()
        if status >= 0:
            return f"the engine process ended with status {status}"
        hint = ", perhaps by the system for want of memory" if status == -signal.SIGKILL else ""
        return f"the engine process was ended by {signal.Signals(-status).name}{hint}"
