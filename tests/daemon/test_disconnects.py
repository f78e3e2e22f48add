"""A client that leaves takes its work with it (case c13), and a client that waits sees signs of life."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import psutil
import pytest
from daemon_in_loop import Daemon, case, in_loop, running_daemon
from fake_models import QWEN_INFILL
from waiting import PATIENCE, until_so

from quantd.daemon.limits import Limits
from quantd.daemon.wire.stream import Timing
from quantd.engine.errors import CapacityError

CHAT = "/v1/chat/completions"


def open_request(daemon: Daemon, body: object, path: str = CHAT, tcp: bool = False) -> socket.socket:
    """A raw connection on which a request was sent and nothing was read."""
    data = json.dumps(body).encode()
    if tcp:
        connection = socket.create_connection(("127.0.0.1", daemon.port))
    else:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(daemon.path))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def num_running(daemon: Daemon) -> int:
    return sum(len(engine.running) for engine in daemon.engines.started)


LONG_REQUESTS = [
    (CHAT, {"max_tokens": 400}),
    (CHAT, {"max_tokens": 400, "n": 4}),
    ("/v1/messages", {"max_tokens": 400}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 400}),
    ("/completion", {"prompt": "hi", "n_predict": 400}),
    ("/infill", {"input_prefix": "hi", "input_suffix": "", "n_predict": 400}),
    ("/v1/fim/completions", {"prompt": "hi", "max_tokens": 400}),
    ("/api/chat", {"options": {"num_predict": 400}}),
    ("/api/generate", {"prompt": "hi", "options": {"num_predict": 400}}),
    ("/api/embed", {"input": "hi"}),
]


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "changes"), LONG_REQUESTS)
@pytest.mark.parametrize("reset", [False, True], ids=["close", "reset"])
def test_leaving_aborts_at_once(
    path: str, changes: dict[str, object], stream: bool, tcp: bool, reset: bool
) -> None:
    async def leave() -> None:
        async with running_daemon(tokens=QWEN_INFILL) as daemon:
            await daemon.service.models.open("tiny")
            await daemon.service.models.entries[0].loaded()
            daemon.engine.gate.clear()
            connection = open_request(daemon, case("c13") | changes | {"stream": stream}, path, tcp)
            await until_so(lambda: num_running(daemon) == changes.get("n", 1))
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.close()
            await until_so(lambda: num_running(daemon) == 0)
            assert len(daemon.engine.aborted) == changes.get("n", 1)
            await daemon.service.wait_idle()
            assert daemon.service.models.entries[0].model.num_requests == 0

    in_loop(leave)()


@in_loop
async def test_leaving_in_the_middle_of_a_stream() -> None:
    async with running_daemon() as daemon:
        body = case("c13") | {"max_tokens": 400, "stream": True}
        async with daemon.session.post(f"http://x{CHAT}", json=body) as response:
            assert await response.content.readline()
            daemon.engine.gate.clear()
        await daemon.settle()
        assert daemon.engine.aborted


@in_loop
async def test_leaving_while_the_model_loads() -> None:
    async with running_daemon() as daemon:
        daemon.engines.release = asyncio.Event()
        connection = open_request(daemon, case("c13"))
        await until_so(lambda: daemon.engines.configs)
        connection.close()
        await daemon.service.wait_idle()
        daemon.engines.release.set()
        await until_so(lambda: daemon.service.models.entries[0].state == "ready")
        assert not daemon.engine.seen


@in_loop
async def test_fifty_clients_leave_nothing_behind() -> None:
    async with running_daemon() as daemon:
        await daemon.post(CHAT, case("c13") | {"max_tokens": 2})
        before = psutil.Process().num_fds()
        for number in range(50):
            connection = open_request(daemon, case("c13") | {"stream": number % 2 == 0, "n": 1 + number % 3})
            await asyncio.sleep(0.002)
            connection.close()
        await until_so(lambda: num_running(daemon) == 0 and psutil.Process().num_fds() <= before)
        await daemon.service.wait_idle()


@in_loop
async def test_a_silent_engine_does_not_make_a_silent_stream() -> None:
    async with running_daemon(timing=Timing(ping_seconds=0.01)) as daemon:
        body = case("c13") | {"max_tokens": 3, "stream": True}
        await daemon.stream(CHAT, body)
        daemon.engine.gate.clear()
        async with daemon.session.post(f"http://x{CHAT}", json=body) as response:
            while await response.content.readline() != b": ping\n":
                pass
            daemon.engine.gate.set()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")


@in_loop
async def test_a_stream_whose_model_loads_has_headers_and_signs_of_life() -> None:
    async with running_daemon(timing=Timing(ping_seconds=0.01)) as daemon:
        daemon.engines.release = asyncio.Event()
        body = case("c13") | {"max_tokens": 3, "stream": True}
        async with daemon.session.post(f"http://x{CHAT}", json=body) as response:
            assert response.status == 200
            while b" is loading" not in await response.content.readline():
                pass
            daemon.engines.release.set()
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await daemon.service.wait_idle()


@in_loop
async def test_a_load_that_fails_after_signs_of_life_is_told_in_the_stream() -> None:
    async with running_daemon(timing=Timing(ping_seconds=0.01)) as daemon:
        daemon.engines.release = asyncio.Event()
        daemon.engines.failures.append(CapacityError("no room"))
        body = case("c13") | {"max_tokens": 3, "stream": True}
        async with daemon.session.post(f"http://x{CHAT}", json=body) as response:
            while b" is loading" not in await response.content.readline():
                pass
            daemon.engines.release.set()
            assert b'"message":"no room"' in await response.read()
        await daemon.service.wait_idle()


@in_loop
async def test_a_client_that_reads_nothing_is_given_up_and_others_go_on() -> None:
    async with running_daemon(limits=Limits(write_timeout=0.2)) as daemon:
        body = case("c13") | {"max_tokens": 450, "stream": True, "logprobs": True, "n": 8}
        with open_request(daemon, body) as connection:
            await until_so(lambda: daemon.engines.started)
            assert (await daemon.post(CHAT, case("c13") | {"max_tokens": 3}))[0] == 200
            await daemon.service.wait_idle()
            assert daemon.service.models.entries[0].model.num_requests == 0
            connection.settimeout(PATIENCE)
            received = b"".join(iter(lambda: connection.recv(2**20), b""))
            assert received.startswith(b"HTTP/1.1 200") and b"[DONE]" not in received
