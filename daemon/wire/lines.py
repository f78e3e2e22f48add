"""A long task told line by line, with the last line again where nothing new is to be said for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import msgspec
from aiohttp import web

from quantd.daemon.wire.errors import ErrorShape, fault_of

NDJSON = "application/x-ndjson"

Lines = AsyncGenerator[Mapping[str, Any]]


def json_line(fields: Mapping[str, Any]) -> bytes:
    """An object as a line."""
    return msgspec.json.encode(fields) + b"\n"


async def send_lines(
    request: web.Request, lines: Lines, shape: ErrorShape, ping_seconds: float
) -> web.StreamResponse:
    """Send lines as they come. What goes wrong is the last line; a client that leaves ends the task."""
    response = web.StreamResponse(headers={"Content-Type": NDJSON, "Cache-Control": "no-cache"})
    await response.prepare(request)
    async with aclosing(_repeating(lines, ping_seconds)) as repeating:
        try:
            async for line in repeating:
                await response.write(json_line(line))
        except ConnectionError:
            return response  # the client is gone, and with it the task
        # The boundary of a request once its status is out.
        except Exception as error:
            await response.write(json_line(shape(fault_of(error))))
    await response.write_eof()
    return response


async def _repeating(lines: Lines, seconds: float) -> Lines:
    """The lines, each again after so many seconds without another."""
    line: Mapping[str, Any] | None = None
    async with aclosing(lines):
        while True:
            coming = asyncio.ensure_future(anext(lines, None))
            try:
                while not (await asyncio.wait({coming}, timeout=seconds))[0]:
                    if line is not None:
                        yield line
                line = coming.result()
            finally:
                if not coming.done():
                    coming.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await coming
            if line is None:
                return
            yield line
