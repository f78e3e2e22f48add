"""Answers that go out while they are made: headers at once, then frames, with a sign of life in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar, Protocol

import msgspec
from aiohttp import web

from quantd.daemon.generation import Delta, Generation, Usage


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
    request: web.Request, generation: Generation, frames: StreamFormat, ping_seconds: float
) -> web.StreamResponse:
    """Send a generation as it comes, with a ping after so many seconds of silence.

    An error after the headers is told in the stream.
    """
    response = web.StreamResponse(headers={"Content-Type": frames.content_type, "Cache-Control": "no-cache"})
    await response.prepare(request)
    try:
        await _send(response, generation, frames, ping_seconds)
    # The client is gone; leaving the generation's context ends the work.
    except ConnectionError:
        return response
    # The boundary of a request once its status is out.
    except Exception as error:
        await _write(response, frames.error(error))
    await response.write_eof()
    return response


async def _send(
    response: web.StreamResponse, generation: Generation, frames: StreamFormat, ping_seconds: float
) -> None:
    await _write(response, frames.start())
    while True:
        try:
            async with asyncio.timeout(ping_seconds):
                delta = await anext(generation)
        except TimeoutError:
            await response.write(frames.ping)
        except StopAsyncIteration:
            break
        else:
            await _write(response, frames.delta(delta))
    await _write(response, frames.finish(generation.usage))


async def _write(response: web.StreamResponse, frames: Sequence[bytes]) -> None:
    if frames:
        await response.write(b"".join(frames))
