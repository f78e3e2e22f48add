"""Answers that go out while they are made: headers at once, then frames, with a sign of life in silence."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec
from aiohttp import web

from quantd.daemon.generation import Delta, Generation, Usage


@dataclass(frozen=True)
class Timing:
    """Seconds of silence before a sign of life, and of a client that takes nothing before it is given up."""

    ping_seconds: float = 5.0
    stall_seconds: float = 60.0


DEFAULT_TIMING = Timing()

# Bytes that a transport buffers without asking its writer to wait (asyncio and aiohttp: 64 KiB).
_NEVER_WAITED_FOR = 1 << 14


class StreamFormat(Protocol):
    """A dialect's stream, frame by frame. ping: a frame that clients skip."""

    content_type: ClassVar[str]
    ping: ClassVar[bytes]

    def start(self) -> Sequence[bytes]:
        """The frames before any delta."""

    def delta(self, delta: Delta) -> Sequence[bytes]:
        """The frames of a delta."""

    def finish(self, usage: Usage) -> Sequence[bytes]:
        """The frames after the last delta."""

    def error(self, error: Exception) -> Sequence[bytes]:
        """The frames that end a stream that failed."""


def sse_frame(data: object) -> bytes:
    """A server-sent event of one line of JSON (WHATWG HTML, section 9.2)."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def send_stream(
    request: web.Request, generation: Generation, frames: StreamFormat, timing: Timing
) -> web.StreamResponse:
    """Send a generation as it comes, with signs of life.

    An error after the headers is told in the stream. A client that takes nothing for long counts as gone:
    what it does not read would pile up here.
    """
    response = web.StreamResponse(headers={"Content-Type": frames.content_type, "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        async with aclosing(_parts(generation, frames, timing.ping_seconds)) as parts:
            async for part in parts:
                await _write(request, response, part, timing.stall_seconds)
        async with asyncio.timeout(timing.stall_seconds):
            await response.write_eof()
    # The client is gone; leaving the generation's context ends the work.
    except ConnectionError:
        pass
    except TimeoutError:
        if request.transport is not None:
            request.transport.abort()
    return response


async def _write(
    request: web.Request, response: web.StreamResponse, part: bytes, stall_seconds: float
) -> None:
    """Raises TimeoutError for a client that takes nothing. A little needs no timer once all else is taken."""
    took_all = request.transport is not None and request.transport.get_write_buffer_size() == 0
    if took_all and len(part) <= _NEVER_WAITED_FOR:
        await response.write(part)
        return
    async with asyncio.timeout(stall_seconds):
        await response.write(part)


async def _parts(generation: Generation, frames: StreamFormat, ping_seconds: float) -> AsyncGenerator[bytes]:
    """What to write, a piece at a time: all that is ready, or a sign of life."""
    try:
        for frame in frames.start():
            yield frame
        async for deltas in generation.batches(ping_seconds):
            part = b"".join(frame for delta in deltas for frame in frames.delta(delta))
            if part or not deltas:
                yield part or frames.ping
        yield b"".join(frames.finish(generation.usage))
    # The boundary of a request once its status is out.
    except Exception as error:
        yield b"".join(frames.error(error))
