"""A proxy on loopback between a client and a daemon: it keeps what is generated, and can force a tool call.

All else passes through as it is. A client that hangs up is hung up on the daemon at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from dialects import Dialect, dialect_of

from quantd.daemon.limits import DEFAULT_LIMITS
from quantd.daemon.wire.encodings import read_data
from quantd.daemon.wire.incoming import LIMITS

_OF_THE_CONNECTION = {"host", "content-length", "transfer-encoding", "connection", "content-encoding"}
_MAX_BODY = 1 << 26


@dataclass
class Exchange:
    """One generation. left: the client hung up before the end."""

    dialect: Dialect
    body: dict[str, Any]
    status: int = 0
    streamed: bool = False
    left: bool = False
    data: bytearray = field(default_factory=bytearray)

    @property
    def events(self) -> list[Any]:
        """The objects of the stream so far, or the whole reply."""
        if not self.streamed:
            return [json.loads(self.data)] if self.data else []
        lines = bytes(self.data).split(b"\n")[:-1]
        data = [line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")]
        return [json.loads(text) for text in data if text != b"[DONE]"]

    @property
    def texts(self) -> list[str]:
        """The pieces of the answer."""
        return [text for event in self.events if (text := self.dialect.text(event))]

    @property
    def calls(self) -> set[str]:
        return self.dialect.calls(self.events) if self.status == 200 else set()


class Recorder:
    """Exchanges in the order of their requests. forced: a tool to be called in the next answer that can."""

    def __init__(self, upstream: str) -> None:
        self.exchanges: list[Exchange] = []
        self.forced: str | None = None
        self.speaking = asyncio.Event()
        self._upstream = upstream

    def restart(self, forced: str | None = None) -> None:
        """Forget what was."""
        self.exchanges, self.forced = [], forced
        self.speaking = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Pass a request on, and the answer back."""
        data = await read_data(request)
        dialect = dialect_of(request.path) if request.method == "POST" else None
        if dialect is None:
            return await self._pass(request, data, None)
        exchange = Exchange(dialect, self._changed(dialect, json.loads(data)))
        self.exchanges.append(exchange)
        try:
            return await self._pass(request, json.dumps(exchange.body).encode(), exchange)
        except (asyncio.CancelledError, ConnectionError):
            exchange.left = True
            raise

    async def _pass(self, request: web.Request, data: bytes, exchange: Exchange | None) -> web.StreamResponse:
        url, limit = self._upstream + request.path_qs, aiohttp.ClientTimeout(total=None)
        headers = _passed(request.headers) | {"Accept-Encoding": "identity"}
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.request(request.method, url, data=data or None, headers=headers) as answer,
        ):
            response = web.StreamResponse(status=answer.status, headers=_passed(answer.headers))
            await response.prepare(request)
            async for part in answer.content.iter_any():
                if exchange is not None:
                    self._note(exchange, answer, part)
                await response.write(part)
            await response.write_eof()
            return response

    def _changed(self, dialect: Dialect, body: dict[str, Any]) -> dict[str, Any]:
        if self.forced is None or self.forced not in dialect.tools(body):
            return body
        tool, self.forced = self.forced, None
        return body | {"tool_choice": dialect.force(tool)}

    def _note(self, exchange: Exchange, answer: aiohttp.ClientResponse, part: bytes) -> None:
        exchange.status = answer.status
        exchange.streamed = answer.content_type == "text/event-stream"
        exchange.data += part
        if exchange.streamed and not self.speaking.is_set() and exchange.texts:
            self.speaking.set()


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers that say something of what is sent, not of the connection."""
    return {name: value for name, value in headers.items() if name.lower() not in _OF_THE_CONNECTION}


@asynccontextmanager
async def recording(upstream: str) -> AsyncIterator[tuple[Recorder, int]]:
    """A recorder before a daemon at this URL, and the port that it listens on."""
    recorder = Recorder(upstream)
    app = web.Application(client_max_size=_MAX_BODY)
    app[LIMITS] = DEFAULT_LIMITS
    app.router.add_route("*", "/{path:.*}", recorder.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield recorder, _port(runner.addresses)
    finally:
        await runner.cleanup()


def _port(addresses: Sequence[Any]) -> int:
    return int(addresses[0][1])
