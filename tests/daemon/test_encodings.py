"""Bodies that come compressed, as Codex sends them: read on every route, none larger than a plain one."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import psutil
import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon

from quantd.daemon.limits import DEFAULT_LIMITS
from quantd.daemon.wire.encodings import zstd

HI = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}], "input": "hi"}
ENCODINGS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstd.compress,
    "gzip": gzip.compress,
    "deflate": zlib.compress,
}
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses")


async def send(daemon: Daemon, path: str, data: bytes, encoding: str) -> int:
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    async with daemon.session.post(f"http://x{path}", data=data, headers=headers) as response:
        assert isinstance(await response.json(), dict)
        return response.status


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_compressed_bodies(encoding: str) -> None:
    compress = ENCODINGS[encoding]
    body = json.dumps(HI | {"padding": "x" * 200_000}).encode()

    async def post() -> None:
        async with running_daemon() as daemon:
            for path in PATHS:
                assert await send(daemon, path, compress(body), encoding) == 200
                assert await send(daemon, path, compress(body)[:-9], encoding) == 400
                assert await send(daemon, path, body, encoding) == 400

    in_loop(post)()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_bomb_is_as_large_as_what_it_holds(encoding: str) -> None:
    """A few kilobytes that would be a quarter of a gigabyte."""
    bomb = ENCODINGS[encoding](b'{"padding":"' + b" " * (4 * DEFAULT_LIMITS.max_body) + b'"}')

    async def post() -> None:
        async with running_daemon() as daemon:
            before = psutil.Process().memory_info().rss
            for path in PATHS:
                assert await send(daemon, path, bomb, encoding) == 413
            assert psutil.Process().memory_info().rss - before < 3 * DEFAULT_LIMITS.max_body
            assert await send(daemon, PATHS[0], ENCODINGS[encoding](json.dumps(HI).encode()), encoding) == 200

    in_loop(post)()


@in_loop
async def test_frames_in_a_row_are_one_body() -> None:
    """RFC 8878, section 3.1: frames may follow each other."""
    body = json.dumps(HI).encode()
    async with running_daemon() as daemon:
        data = zstd.compress(body[:20]) + zstd.compress(body[20:])
        assert await send(daemon, PATHS[0], data, "zstd") == 200


@in_loop
async def test_encodings_that_are_unknown_are_named() -> None:
    """RFC 9110, section 15.5.16."""
    async with running_daemon() as daemon:
        for encoding in ("compress", "br", "zstd, gzip"):
            headers = {"Content-Encoding": encoding}
            async with daemon.session.post(f"http://x{PATHS[0]}", data=b"{}", headers=headers) as response:
                assert response.status == 415, encoding
                assert response.headers["Accept-Encoding"] == "zstd, gzip, deflate"
                assert encoding in (await response.json())["error"]["message"]
        headers = {"Content-Encoding": "identity"}
        async with daemon.session.post(f"http://x{PATHS[0]}", json=HI, headers=headers) as response:
            assert response.status == 200
