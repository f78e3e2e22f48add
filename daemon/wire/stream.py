"""Answers that go out while they are made: headers at once, then frames, with a sign of life in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import msgspec
from aiohttp import web

from quantd.daemon.activity import current_wait
from quantd.daemon.deltas import Delta, Head, Usage
from quantd.daemon.generation import Generation


@dataclass(frozen=True)
class Timing:
    """ping_seconds: of silence before a sign of life. header_seconds: before the status and headers go out,
    while a model loads; what is refused by then has a status of its own.
    """

    ping_seconds: float = 5.0
    header_seconds: float = 1.0


DEFAULT_TIMING = Timing()


class StreamFormat(Protocol):
    """A dialect's stream, frame by frame."""

    content_type: ClassVar[str]

    def ping(self, why: str) -> bytes:
        """A sign of life, which clients skip, maybe before all other frames.

        why: what they wait for, if that is known.
        """

    def start(self, head: Head) -> Sequence[bytes]:
        """The frames before any delta."""

    def delta(self, delta: Delta) -> Sequence[bytes]:
        """The frames of a delta."""

    def finish(self, usage: Usage) -> Sequence[bytes]:
        """The frames after the last delta."""

    def error(self, error: Exception) -> Sequence[bytes]:
        """The frames that end a stream that failed, maybe before its start."""


def sse_frame(data: object, event: str | None = None) -> bytes:
    """A server-sent event of one line of JSON, maybe with a name (WHATWG HTML, section 9.2)."""
    name = b"" if event is None else b"event: " + event.encode() + b"\n"
    return name + b"data: " + msgspec.json.encode(data) + b"\n\n"


def sse_comment(text: str) -> bytes:
    """A line that clients skip and people who look at the stream read (WHATWG HTML, section 9.2)."""
    return f": {text}".rstrip().encode() + b"\n\n"


async def send_stream(
    request: web.Request,
    starting: Coroutine[Any, Any, Generation],
    frames: StreamFormat,
    timing: Timing,
) -> web.StreamResponse:
    """Send a generation that starts, as it comes, with signs of life, also while its model loads.

    An error before the headers is raised; one after that is told in the stream.
    """
    async with _Start(starting) as start:
        await start.wait(min(timing.header_seconds, timing.ping_seconds))
        parts = _parts(start, frames, timing.ping_seconds)
        return await send_parts(request, parts, frames.content_type)


async def send_parts(
    request: web.Request, parts: AsyncGenerator[bytes], content_type: str
) -> web.StreamResponse:
    """Send the parts of a body as they come, until there are no more or the client is gone."""
    response = web.StreamResponse(headers={"Content-Type": content_type, "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        async with aclosing(parts):
            async for part in parts:
                await response.write(part)
        await response.write_eof()
    # The client is gone; what comes from here on ends the work.
    except ConnectionError:
        pass
    return response


class _Start:
    """A generation that is being started; leaving the context ends it, or its start."""

    def __init__(self, starting: Coroutine[Any, Any, Generation]) -> None:
        self._task = asyncio.ensure_future(starting)

    async def __aenter__(self) -> _Start:
        return self

    async def __aexit__(self, *_: object) -> None:
        if not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
        # No await goes between: whoever cancels this one must find the generation being closed.
        elif self._task.exception() is None:
            await self._task.result().__aexit__(None, None, None)

    async def wait(self, seconds: float) -> Generation | None:
        """The generation, if it has started after so many seconds. Raises what kept it from that."""
        if not self._task.done():
            await asyncio.wait({self._task}, timeout=seconds)
        return self._task.result() if self._task.done() else None


async def _parts(start: _Start, frames: StreamFormat, ping_seconds: float) -> AsyncGenerator[bytes]:
    """What to write, a piece at a time: all that is ready, or a sign of life.

    A format may hold back what it is given for long, so silence is told by what was written.
    """
    loop = asyncio.get_running_loop()
    try:
        while (generation := await start.wait(ping_seconds)) is None:
            yield frames.ping(current_wait())
        for frame in frames.start(generation.head):
            yield frame
        written = loop.time()
        async for deltas in generation.batches(ping_seconds):
            part = b"".join(frame for delta in deltas for frame in frames.delta(delta))
            if part or not deltas or loop.time() >= written + ping_seconds:
                yield part or frames.ping(current_wait())
                written = loop.time()
        yield b"".join(frames.finish(generation.usage))
    # The boundary of a request once its status is out.
    except Exception as error:
        yield b"".join(frames.error(error))
