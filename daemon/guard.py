"""The gate that every request passes: where it comes from, who asks, and whether that one may.

Also what browsers are told of pages that may ask (CORS, WHATWG Fetch, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from aiohttp import web

from quantd.daemon.access.peers import Connection
from quantd.daemon.access.policy import Access, Asked
from quantd.daemon.access.scope import Client, Scope
from quantd.daemon.admission import Admission
from quantd.daemon.errors import ForeignSiteError
from quantd.daemon.http_connection import HttpConnection
from quantd.daemon.routes.route import route_of

ACCESS = web.AppKey("access", Access)
# All requests, those too that want no model, by client: none takes all connections.
UNDER_WAY = web.AppKey("under_way", Admission)
_CLIENT = web.RequestKey("client", Client)

# What proxies say of those that they speak for (RFC 7239; RFC 9110, section 7.6.3).
_PROXY_HEADERS = ("Forwarded", "Via", "X-Forwarded-For", "X-Real-IP")
_EXPOSED = "request-id, x-request-id, retry-after"
_PREFLIGHT_SECONDS = 600


def client_of(request: web.Request) -> Client:
    """Who asks."""
    return request[_CLIENT]


@web.middleware
async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
    """Let a request through to its handler, or raise what keeps it out."""
    access, peer = request.app[ACCESS], connection_of(request)
    if request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers:
        return _preflight(request, access, peer)
    request[_CLIENT] = client = access.client(peer, _asked(request), _needed(request))
    with ExitStack() as held:
        request.app[UNDER_WAY].enter(client.id, 1, held)
        response: web.StreamResponse = await handler(request)
        return response


def connection_of(request: web.Request) -> Connection:
    """What it came over."""
    assert isinstance(request.protocol, HttpConnection)
    return request.protocol.peer


def _needed(request: web.Request) -> Scope:
    """What the route needs; which paths there are is nothing for everybody."""
    route = route_of(request)
    return Scope.INFER if route is None else route.scope


def _asked(request: web.Request) -> Asked:
    headers = request.headers
    return Asked(
        host=headers.get("Host"),
        origin=headers.get("Origin"),
        fetch_site=headers.get("Sec-Fetch-Site"),
        keys=tuple(_keys(request)),
        is_forwarded=any(name in headers for name in _PROXY_HEADERS),
    )


def _keys(request: web.Request) -> Iterator[str]:
    """The keys that a request brings, where clients of all the dialects have them.

    Not as Basic, which browsers send by themselves once they know it.
    """
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        yield token.strip()
    if key := request.headers.get("x-api-key", "").strip():
        yield key


def _preflight(request: web.Request, access: Access, peer: Connection) -> web.Response:
    """Whether a page may ask: the browser wants to know before it lets it. Raises ForeignSiteError."""
    origin, host = request.headers.get("Origin", ""), request.headers.get("Host", "")
    if not access.sites.has_origin(origin) or (peer.is_loopback and not access.sites.has_host(host)):
        raise ForeignSiteError(f"Origin {origin[:100]!r} is not allowed; allow_origins can name it")
    headers = {
        "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE",
        "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", ""),
        "Access-Control-Max-Age": str(_PREFLIGHT_SECONDS),
    }
    if "Access-Control-Request-Private-Network" in request.headers:
        headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)


async def tell_origin(request: web.Request, response: web.StreamResponse) -> None:
    """Let the browser show an answer to a page that may ask."""
    origin = request.headers.get("Origin")
    if origin is not None and request.app[ACCESS].sites.has_origin(origin):
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = _EXPOSED
    response.headers.add("Vary", "Origin")
