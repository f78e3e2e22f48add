"""What clients may take: sizes, numbers and times, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import socket
from pathlib import Path

import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon
from waiting import until_so

from quantd.daemon.access.keys import KeyFile
from quantd.daemon.access.policy import Access
from quantd.daemon.limits import Limits

CHAT = "/v1/chat/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


async def connect(daemon: Daemon) -> socket.socket:
    """A connection."""
    connection = socket.socket(socket.AF_UNIX)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, str(daemon.path))
    return connection


async def send(connection: socket.socket, data: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, data)


async def receive(connection: socket.socket) -> bytes:
    """All that comes until the other end closes."""
    data = b""
    while part := await asyncio.get_running_loop().sock_recv(connection, 65536):
        data += part
    return data


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: x", *headers, "", ""]).encode()


def told(answer: bytes) -> tuple[int, str]:
    """Status and message of an error in OpenAI's form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"Content-Type: application/json" in head
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("sent", "status", "words"),
    [
        (get("/health", "X: " + "a" * 3000), 431, "2048 bytes"),
        (get("/" + "a" * 3000), 431, "2048 bytes"),
        (get("/health", *(f"X-{number}: a" for number in range(200))), 431, "headers"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400, "not HTTP"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n", 400, "not HTTP"),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nbad\r\n\r\n", 400, "not HTTP"),
        (
            b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
            "not HTTP",
        ),
    ],
)
def test_heads_that_are_too_large_or_no_http(sent: bytes, status: int, words: str) -> None:
    async def ask() -> None:
        async with running_daemon(limits=Limits(max_header=2048)) as daemon:
            with await connect(daemon) as connection:
                await send(connection, sent)
                found, message = told(await receive(connection))
                assert found == status and words in message, message
            assert (await daemon.get("/health"))[0] == 200

    in_loop(ask)()


@in_loop
async def test_bodies_that_are_too_large() -> None:
    async with running_daemon(limits=Limits(max_body=10_000)) as daemon:
        large = HI | {"user": "x" * 10_000}
        status, answer = await daemon.post(CHAT, large)
        assert status == 413 and answer["error"]["type"] == "invalid_request_error"
        status, answer = await daemon.post("/api/chat", large)
        assert status == 413 and isinstance(answer["error"], str)

        async def pieces() -> object:
            for _ in range(20):
                yield b"x" * 1000

        async with daemon.session.post(f"http://x{CHAT}", data=pieces()) as response:
            assert response.status == 413
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 10001\r\n\r\n"
        with await connect(daemon) as connection:  # refused before it comes
            await send(connection, head.encode())
            assert (await asyncio.get_running_loop().sock_recv(connection, 100)).startswith(b"HTTP/1.1 413 ")
        assert (await daemon.post(CHAT, HI | {"user": "x" * 9_000}))[0] == 200


@in_loop
async def test_many_may_come_while_the_daemon_is_busy() -> None:
    """A client on a Unix socket is told to try again where too many wait; not every library does."""
    async with running_daemon() as daemon:
        with contextlib.ExitStack() as opened:
            for _ in range(400):
                connection = opened.enter_context(socket.socket(socket.AF_UNIX))
                connection.setblocking(False)
                connection.connect(str(daemon.path))
            await send(connection, get("/health", "Connection: close"))
            assert (await receive(connection)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n", get("/health")])
def test_who_asks_for_nothing_for_long_is_cut(sent: bytes) -> None:
    """From the start, in the middle of a head, or behind an answer."""

    async def wait() -> None:
        async with running_daemon(limits=Limits(idle_timeout=0.5)) as daemon:
            with await connect(daemon) as connection:
                await send(connection, sent)
                answer = await receive(connection)
                assert answer.startswith(b"HTTP/1.1 200 ") if sent.endswith(b"\r\n\r\n") else answer == b""

    in_loop(wait)()


@in_loop
async def test_a_head_that_trickles_is_cut() -> None:
    async with running_daemon(limits=Limits(idle_timeout=0.5)) as daemon:
        with await connect(daemon) as connection:
            reading = asyncio.create_task(receive(connection))
            with pytest.raises(ConnectionError):
                for byte in get("/health", "X: " + "a" * 1000):
                    await send(connection, bytes([byte]))
                    await asyncio.sleep(0.01)
            with contextlib.suppress(ConnectionError):
                assert await reading == b""


@in_loop
async def test_a_body_that_does_not_come_is_cut_and_one_that_comes_slowly_is_not() -> None:
    async with running_daemon(limits=Limits(read_timeout=0.8)) as daemon:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        body = json.dumps(HI).encode()
        with await connect(daemon) as connection:
            await send(connection, (head % (len(body) + 1)).encode() + body)
            answer = await asyncio.get_running_loop().sock_recv(connection, 65536)
            assert told(answer)[0] == 408
        pieces = [b'{"user": "'] + [b"x" * 50_000] * 8 + [b'",' + body[1:]]
        with await connect(daemon) as connection:
            await send(connection, (head % sum(map(len, pieces))).encode())
            for piece in pieces:
                await send(connection, piece)
                await asyncio.sleep(0.1)
            assert (await receive(connection)).startswith(b"HTTP/1.1 200 ")


MUCH = 7 * get("/openapi.json") + get("/openapi.json", "Connection: close")
"""Asks for more than a socket's buffer takes."""


async def until_cut(connection: socket.socket) -> None:
    """Wait until the other end has closed, without reading."""
    ends = select.poll()
    ends.register(connection, select.POLLHUP | select.POLLRDHUP)
    await until_so(lambda: ends.poll(0))


@in_loop
async def test_who_does_not_read_is_cut() -> None:
    async with running_daemon(limits=Limits(write_timeout=0.2)) as daemon:
        with await connect(daemon) as connection:
            await send(connection, MUCH)
            await until_cut(connection)
            received = b""
            with contextlib.suppress(ConnectionError):
                received = await receive(connection)
        assert len(received) < 2**19


@in_loop
async def test_who_reads_slowly_is_not_cut() -> None:
    async with running_daemon(limits=Limits(write_timeout=1.0)) as daemon:
        with await connect(daemon) as connection:
            await send(connection, MUCH)
            loop, size = asyncio.get_running_loop(), 0
            for _ in range(8):
                size += len(await loop.sock_recv(connection, 65536))
                await asyncio.sleep(0.2)
            size += len(await receive(connection))
        assert size > 2**19


@in_loop
async def test_of_too_many_connections_idle_ones_go_and_busy_ones_stay() -> None:
    async with running_daemon(limits=Limits(max_connections=3)) as daemon:
        await daemon.post(CHAT, HI)
        daemon.engine.gate.clear()
        body = json.dumps(HI).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        idle = await connect(daemon)
        busy = [await connect(daemon) for _ in range(3)]
        for connection in busy:
            await send(connection, head.encode() + body)
        assert await receive(idle) == b""
        await until_so(lambda: len(daemon.engine.running) >= 3)
        refused = await connect(daemon)
        answer = await receive(refused)
        assert told(answer)[0] == 503 and b"Retry-After: 1" in answer
        daemon.engine.gate.set()
        for connection in busy:
            assert (await receive(connection)).startswith(b"HTTP/1.1 200 ")
        assert (await daemon.get("/health"))[0] == 200
        for connection in (idle, refused, *busy):
            connection.close()


@in_loop
async def test_one_client_leaves_room_for_others(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    headers = {"Authorization": f"Bearer {keys.add('other')}"}
    limits = Limits(max_client_queue=3)
    async with running_daemon(access=Access(keys), limits=limits, max_queue=4) as daemon:
        await daemon.post(CHAT, HI)
        daemon.engine.gate.clear()
        running = asyncio.create_task(daemon.post(CHAT, HI | {"n": 3}))
        await until_so(lambda: len(daemon.engine.running) >= 3)
        async with daemon.session.post(f"http://x{CHAT}", json=HI) as response:
            assert response.status == 429 and response.headers["Retry-After"] == "1"
            assert "max_client_queue" in (await response.json())["error"]["message"]
        assert (await daemon.post("/api/chat", HI))[0] == 503
        async with daemon.over_port(headers) as session:
            other = asyncio.create_task(session.post(CHAT, json=HI))
            await until_so(lambda: len(daemon.engine.running) >= 4)
            daemon.engine.gate.set()
            async with await other as response:
                assert response.status == 200
        assert (await running)[0] == 200
        status, answer = await daemon.post(CHAT, HI | {"n": 4})
        assert status == 400 and answer["error"]["param"] == "n"
