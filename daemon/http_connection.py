"""A connection of a client: who is at its other end, and what it may take, in time and in number."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import cast

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong

from quantd.daemon.access.peers import Connection
from quantd.daemon.limits import Limits
from quantd.daemon.sockets import BACKLOG
from quantd.daemon.wire.errors import Fault, json_response, openai_error

_log = logging.getLogger(__name__)

_TOO_MANY_HEADERS = "Too many headers received"


class HttpConnection(web.RequestHandler):
    """The HTTP library's connection, with bounds.

    Of too many connections those that ask for nothing go first. One that takes longer than idle_timeout to
    send the head of a request, or that reads nothing for write_timeout, is cut.
    """

    __slots__ = ("_limits", "_server", "_stall", "_unsent", "_wire", "peer")

    def __init__(self, server: web.Server, limits: Limits) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=limits.idle_timeout,
            max_line_size=limits.max_header,
            max_field_size=limits.max_header,
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,
        )
        self._limits = limits
        self._server = server
        self._stall: asyncio.TimerHandle | None = None
        self._unsent = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Greet a client, or send it away."""
        self._wire = cast(asyncio.Transport, transport)
        self.peer = Connection(transport.get_extra_info("socket"))
        if self._has_room():
            super().connection_made(transport)
        else:
            self._wire.write(_full(self._limits.max_connections))
            self._wire.close()
            self.force_close()

    def _has_room(self) -> bool:
        """Whether one more may come, maybe for one that goes."""
        connections = self._server.connections
        if len(connections) < self._limits.max_connections:
            return True
        for other in connections:
            if isinstance(other, HttpConnection) and other.is_idle:
                other.force_close()
                return True
        return False

    @property
    def is_idle(self) -> bool:
        """Whether it asks for nothing at the moment."""
        return not self._request_count or (self._waiter is not None and not self._waiter.done())

    def connection_lost(self, exc: BaseException | None) -> None:
        """The client is gone."""
        self._unwatch()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client is behind with reading."""
        super().pause_writing()
        self._watch()

    def resume_writing(self) -> None:
        """It has caught up."""
        self._unwatch()
        super().resume_writing()

    def force_close(self) -> None:
        """Close, once what was sent is read, or is not."""
        super().force_close()
        self._watch()

    async def start(self) -> None:
        """Answer requests until the last one."""
        await super().start()
        self._watch()

    def _watch(self) -> None:
        """See to it that the client reads."""
        self._unwatch()
        self._unsent = self._wire.get_write_buffer_size()
        if self._unsent:
            self._stall = self._loop.call_later(self._limits.write_timeout, self._look)

    def _unwatch(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _look(self) -> None:
        if self._wire.get_write_buffer_size() < self._unsent:
            self._watch()
        else:
            self._wire.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """An answer to what is not HTTP, or to what is too much of it; the connection ends with it."""
        if request.writer is not None and request.writer.output_size:
            raise ConnectionError("an answer is under way already")
        fault = self._fault(status, exc)
        if fault.status < 500:
            _log.info("not HTTP: %s", fault.message)
        else:
            _log.error("a request failed outside of its handler", exc_info=exc)
        response = json_response(openai_error(fault), fault.status)
        response.force_close()
        return response

    def _fault(self, status: int, exc: BaseException | None) -> Fault:
        if isinstance(exc, LineTooLong):
            limit = self._limits.max_header
            return Fault(431, f"the request line or a header is longer than {limit} bytes", _BAD_REQUEST)
        reason = " ".join(str(exc).split())[:200]
        if isinstance(exc, BadHttpMessage) and _TOO_MANY_HEADERS in reason:
            return Fault(431, f"there are more than {self.max_headers} headers", _BAD_REQUEST)
        if status < 500:
            return Fault(status, f"not HTTP: {reason}", _BAD_REQUEST)
        return Fault(status, "internal error; the daemon's log has the details")


_BAD_REQUEST = "invalid_request_error"


def _full(limit: int) -> bytes:
    fault = Fault(503, f"all {limit} connections are taken (max_connections)", "server_error", "overloaded")
    body = msgspec.json.encode(openai_error(fault))
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


class Site(web.SockSite):
    """A listening socket whose connections are bounded."""

    def __init__(self, runner: web.BaseRunner, listener: socket.socket, limits: Limits) -> None:
        super().__init__(runner, listener)
        self._limits = limits

    async def start(self) -> None:
        """Accept connections."""
        self._runner._reg_site(self)
        server = self._runner.server
        assert server is not None
        loop = asyncio.get_running_loop()
        # It calls listen() again, with a shorter queue unless told.
        self._server = await loop.create_server(
            lambda: HttpConnection(server, self._limits), sock=self._sock, backlog=BACKLOG
        )
