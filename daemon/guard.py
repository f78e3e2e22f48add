"""Keeps web pages of other sites away from a daemon on a loopback port.

A page can reach 127.0.0.1 through a name of its own that resolves there, or by a plain cross-site post.
Both show in the Host and Origin headers. On a Unix socket neither is looked at: no page gets there, and
the file's mode is the access control.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web


@web.middleware
async def refuse_foreign_sites(request: web.Request, handler: Any) -> web.StreamResponse:
    """403 for a request to a loopback address in the name of another host."""
    if _came_over_loopback(request):
        for name in ("Host", "Origin"):
            value = request.headers.get(name)
            if value is not None and not _is_local(value if name == "Origin" else f"http://{value}"):
                raise web.HTTPForbidden(reason=f"{name} {value[:100]!r} is not this machine")
    response: web.StreamResponse = await handler(request)
    return response


def _came_over_loopback(request: web.Request) -> bool:
    address = request.get_extra_info("sockname")
    connection = request.get_extra_info("socket")
    if connection is None or connection.family == socket.AF_UNIX:
        return False
    return ipaddress.ip_address(address[0]).is_loopback


def _is_local(url: str) -> bool:
    """Whether a page of this origin is on this machine; apps and editors have schemes of their own."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return False
    if parts.scheme not in ("http", "https", ""):
        return True
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
