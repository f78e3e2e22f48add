"""GET /: the page for people with a browser, and for programs the words that Ollama's clients look for.

The page is one file that asks nothing of any other host. Its policy (CSP Level 3, Trusted Types) lets the
browser run its own script and style alone, talk to this daemon alone, and make markup of no text.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.routes.content import HTML, TEXT
from quantd.daemon.routes.ollama import ollama_route
from quantd.daemon.routes.route import Route

_PATH = Path(__file__).parents[1] / "page.html"
_INLINE = re.compile(rb"<(script|style)\b[^>]*>(.*?)</\1>", re.DOTALL)


@cache
def page() -> bytes:
    """The page."""
    return _PATH.read_bytes()


@cache
def page_headers() -> dict[str, str]:
    """What a browser is told to keep from the page."""
    hashes: dict[bytes, list[str]] = {b"script": [], b"style": []}
    for kind, text in _INLINE.findall(page()):
        hashes[kind].append(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'")
    policy = (
        "default-src 'none'",
        f"script-src {' '.join(hashes[b'script'])}",
        f"style-src {' '.join(hashes[b'style'])}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
    return {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
        "Vary": "Accept",
    }


def prefers_html(accept: str) -> bool:
    """Whether a client with this Accept header would rather have HTML than plain text.

    One that takes anything, or does not say, would not.
    """
    return _quality(accept, "text/html") > _quality(accept, "text/plain")


def _quality(accept: str, kind: str) -> float:
    """How much a type is wanted, 0 to 1: of the ranges it is in the closest tells (RFC 9110, 12.5.1)."""
    ranges = {kind: 2, f"{kind.split('/')[0]}/*": 1, "*/*": 0}
    closest, quality = -1, 0.0
    for item in accept.lower().split(","):
        name, *parameters = (part.strip() for part in item.split(";"))
        if ranges.get(name, -1) > closest:
            closest, quality = ranges[name], _weight(parameters)
    return quality


def _weight(parameters: Sequence[str]) -> float:
    for parameter in parameters:
        if parameter.startswith("q="):
            try:
                return float(parameter[2:])
            except ValueError:
                return 0.0
    return 1.0


async def root(request: web.Request) -> web.StreamResponse:
    """GET /: the page, or that a daemon is alive."""
    if prefers_html(",".join(request.headers.getall("Accept", []))):
        return web.Response(body=page(), headers=page_headers())
    return web.Response(text="Ollama is running", headers={"Vary": "Accept"})


PAGE_ROUTES: Sequence[Route] = (ollama_route("GET", "/", root, Scope.PUBLIC, TEXT, HTML),)
