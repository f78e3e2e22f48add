"""GET /: the page for browsers, `Ollama is running` for all others, and what browsers may do with it."""

from __future__ import annotations

import base64
import hashlib
import re

import aiohttp
import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon

from quantd.daemon.routes.page import prefers_html

BROWSERS = {
    "Chromium": "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8",
    "Firefox": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8",
    "a bare one": "TEXT/HTML",
    "one that takes text too": "text/plain;q=0.5, text/html",
    "one with parameters": "text/html;level=1;q=0.7,*/*;q=0.1",
}
PROGRAMS = {
    "none": None,
    "curl, Python, Node": "*/*",
    "axios": "application/json, text/plain, */*",
    "Go": "",
    "one that takes any text": "text/*",
    "one that takes both": "text/html, text/plain",
    "one that wants no HTML": "text/html;q=0, */*",
    "one that means something else by q": "text/html;q=much",
    "commas": ",;,/;q=1",
}


async def root(daemon: Daemon, accept: str | None, method: str = "GET") -> tuple[aiohttp.ClientResponse, str]:
    headers = {} if accept is None else {"Accept": accept}
    skipped = ["Accept"] if accept is None else []
    async with daemon.session.request(
        method, "http://x/", headers=headers, skip_auto_headers=skipped
    ) as response:
        return response, await response.text()


@in_loop
async def test_who_gets_the_page() -> None:
    async with running_daemon() as daemon:
        for accept in (*BROWSERS.values(), *PROGRAMS.values()):
            wants = accept in BROWSERS.values()
            response, text = await root(daemon, accept)
            assert response.status == 200 and response.headers["Vary"] == "Accept"
            assert response.content_type == ("text/html" if wants else "text/plain"), accept
            assert text.startswith("<!doctype html>") if wants else text == "Ollama is running"
            head, nothing = await root(daemon, accept, "HEAD")
            assert (head.status, nothing) == (200, "")
            assert head.headers["Content-Length"] == str(len(text.encode()))
            assert head.content_type == response.content_type


@pytest.mark.parametrize("accept", ["text/html;q=1;q=0", "text/html" + ",text/html" * 10_000, "\x00"])
def test_odd_headers_are_read(accept: str) -> None:
    assert isinstance(prefers_html(accept), bool)


@in_loop
async def test_the_policy_lets_the_page_alone_run() -> None:
    async with running_daemon() as daemon:
        response, text = await root(daemon, BROWSERS["Firefox"])
    policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["img-src"] == "data:"
    for directive, tag in (("script-src", "script"), ("style-src", "style")):
        (inline,) = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy[directive] == f"'sha256-{digest}'"
    assert response.headers["X-Content-Type-Options"] == "nosniff"


@in_loop
async def test_the_page_names_no_other_host() -> None:
    async with running_daemon() as daemon:
        _, text = await root(daemon, BROWSERS["Firefox"])
    assert set(re.findall(r"https?://[\w.]+", text)) <= {"http://www.w3.org"}  # SVG's name
    assert not re.search(
        r"\b(src|srcset|action|formaction)=|@import|url\(|innerHTML|insertAdjacentHTML", text
    )
