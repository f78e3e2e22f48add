"""Bodies of requests as they come, in a time that depends on their size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from aiohttp import web

from quantd.daemon.limits import Limits

LIMITS = web.AppKey("limits", Limits)

_LEAST_BYTES_A_SECOND = 1 << 16


async def read_pieces(request: web.Request) -> AsyncIterator[bytes]:
    """The body, piece by piece. Raises HTTPRequestTimeout for a client that keeps it waiting."""
    loop = asyncio.get_running_loop()
    patience = most = request.app[LIMITS].read_timeout
    while True:
        begun = loop.time()
        try:
            async with asyncio.timeout(patience):
                piece = await request.content.readany()
        except TimeoutError:
            raise web.HTTPRequestTimeout(reason="The body does not come") from None
        if not piece:
            return
        patience = min(most, patience - (loop.time() - begun) + len(piece) / _LEAST_BYTES_A_SECOND)
        yield piece


async def read_all(request: web.Request) -> bytes:
    """The body. Raises as `read_pieces`, and HTTPRequestEntityTooLarge as soon as it is known to be so."""
    most = request.client_max_size
    if request.content_length is not None and request.content_length > most:
        raise web.HTTPRequestEntityTooLarge(most, request.content_length)
    data = bytearray()
    async for piece in read_pieces(request):
        data += piece
        if len(data) > most:
            raise web.HTTPRequestEntityTooLarge(most, len(data))
    return bytes(data)
