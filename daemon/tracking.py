"""The outermost middleware: every request gets a name, and a record of who asks and how it ends."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from aiohttp import web

from quantd.daemon.activity import CLIENT_LEFT, Peer, new_request_id, printable
from quantd.daemon.guard import client_of, connection_of
from quantd.daemon.routes.keys import SERVICE
from quantd.daemon.routes.route import route_of
from quantd.daemon.wire.errors import REQUEST_ID_HEADER

_HEADER = f"x-{REQUEST_ID_HEADER}"
_ID = web.RequestKey("request_id", str)
_WELL_FORMED = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")


@web.middleware
async def track_requests(request: web.Request, handler: Any) -> web.StreamResponse:
    """Have the service know which request it works for, and how the exchange ended."""
    activity = request.app[SERVICE].activity
    target = printable(f"{request.method} {request.path}")
    with activity.follow(_id_of(request), _peer_of(request), _route_name(request), target) as record:
        try:
            request[_ID] = record.id
            response: web.StreamResponse = await handler(request)
        except asyncio.CancelledError:
            record.status = CLIENT_LEFT
            raise
        except web.HTTPException as answer:
            record.status = answer.status
            raise
        finally:
            record.client = record.client or _client_id(request)
        record.status = response.status
        return response


async def name_answer(request: web.Request, response: web.StreamResponse) -> None:
    """Give every answer its request's name, where Anthropic's and OpenAI's SDKs look for it."""
    name = request.get(_ID) or new_request_id()  # without one if it was refused before any middleware
    for header in (REQUEST_ID_HEADER, _HEADER):
        response.headers.setdefault(header, name)


def _id_of(request: web.Request) -> str:
    """The client's own name for it, if that can stand in headers and logs."""
    given = request.headers.get(_HEADER, "")
    return given if _WELL_FORMED.fullmatch(given) else new_request_id()


def _route_name(request: web.Request) -> str:
    """Method and path of the route, of which there are few; empty where none is."""
    route = route_of(request)
    return "" if route is None else route.name


def _client_id(request: web.Request) -> str | None:
    """Whose it is; None where it did not come so far that this was found out."""
    try:
        return client_of(request).id
    except KeyError:
        return None


def _peer_of(request: web.Request) -> Peer:
    agent = printable(request.headers.get("User-Agent", "")) or None
    connection = connection_of(request)
    if connection.process is None:
        return Peer(address=request.remote, agent=agent)
    return Peer(pid=connection.process.pid, program=printable(connection.program or "") or None, agent=agent)
