"""Requests whose model is not in memory: signs of life on every surface, and why they wait in the status."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon
from waiting import until_so

from quantd.daemon.wire.stream import Timing
from quantd.engine.messages import Stats

HI = [{"role": "user", "content": "hi"}]
STREAMS: dict[str, tuple[dict[str, Any], str, bytes]] = {
    "/v1/chat/completions": ({"messages": HI, "stream": True}, "text/event-stream", b"[DONE]"),
    "/v1/completions": ({"prompt": "hi", "stream": True}, "text/event-stream", b"[DONE]"),
    "/v1/responses": ({"input": "hi", "stream": True}, "text/event-stream", b"response.incomplete"),
    "/v1/messages": ({"messages": HI, "stream": True}, "text/event-stream", b"message_stop"),
    "/api/chat": ({"messages": HI}, "application/x-ndjson", b'"done":true'),
    "/api/generate": ({"prompt": "hi"}, "application/x-ndjson", b'"done":true'),
    "/completion": ({"prompt": "hi", "stream": True}, "text/event-stream", b'"stop":true'),
}
LIMITS = {"max_tokens": 3, "max_output_tokens": 3, "n_predict": 3, "options": {"num_predict": 3}}


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_shows_life_while_its_model_loads(path: str) -> None:
    body, content_type, end = STREAMS[path]

    async def ask(daemon: Daemon) -> None:
        daemon.engines.release = asyncio.Event()
        limits = {name: value for name, value in LIMITS.items() if _takes(path, name)}
        url = f"http://x{path}"
        async with daemon.session.post(url, json={"model": "tiny"} | body | limits) as response:
            assert response.status == 200
            assert response.headers["Content-Type"].startswith(content_type)
            lives = [await response.content.readany() for _ in range(3)]
            assert all(lives)
            if content_type == "text/event-stream":
                assert b": tiny is loading, 100 %\n\n" in b"".join(lives)
            daemon.engines.release.set()
            assert end in await response.read()

    async def run() -> None:
        async with running_daemon(timing=Timing(ping_seconds=0.02)) as daemon:
            await ask(daemon)

    in_loop(run)()


@in_loop
async def test_headers_do_not_wait_for_the_first_ping() -> None:
    async with running_daemon(timing=Timing(ping_seconds=600, header_seconds=0.02)) as daemon:
        daemon.engines.release = asyncio.Event()
        body = {"model": "tiny", "messages": HI, "stream": True, "max_tokens": 3}
        async with daemon.session.post("http://x/v1/chat/completions", json=body) as reply:
            assert reply.status == 200
            daemon.engines.release.set()
            assert b"[DONE]" in await reply.read()


def _takes(path: str, name: str) -> bool:
    if path == "/v1/responses":
        return name == "max_output_tokens"
    if path == "/completion":
        return name == "n_predict"
    return name == ("options" if path.startswith("/api") else "max_tokens")


async def waiting_of(daemon: Daemon, name: str = "tiny") -> list[dict[str, Any]]:
    _, status = await daemon.get("/quantd/status")
    return next((model["waiting"] for model in status["models"] if model["name"] == name), [])


@in_loop
async def test_the_status_says_that_requests_wait_for_their_model() -> None:
    async with running_daemon() as daemon:
        daemon.engines.release = asyncio.Event()
        body = {"prompt": "hi", "max_tokens": 2}
        asked = [asyncio.create_task(daemon.post("/v1/completions", body)) for _ in range(2)]
        while len(waits := await waiting_of(daemon)) < 2 or "100 %" not in waits[0]["why"]:
            await asyncio.sleep(0.01)
        assert [wait["why"] for wait in waits] == ["tiny is loading, 100 %"] * 2
        assert all(0 < wait["seconds"] < 60 and wait["id"] is None for wait in waits)
        daemon.service.models.entry("tiny").say("waits for memory that requests of a hold")
        assert (await waiting_of(daemon))[0]["why"] == "waits for memory that requests of a hold"
        daemon.engines.release.set()
        await asyncio.gather(*asked)
        assert await waiting_of(daemon) == []


@pytest.mark.parametrize(
    ("stats", "why"),
    [
        (
            Stats(waits_for="blocks", num_running=3, blocks_free=2, blocks_cached=1, blocks_total=9),
            "waits for KV blocks: 3 of 9 are free, 3 requests run",
        ),
        (
            Stats(waits_for="seat", num_running=64),
            "behind 64 running requests, as many as may run at a time (max_num_requests)",
        ),
        (Stats(waits_for="tokens", num_running=2), "behind the prompts of 2 running requests"),
        (Stats(), "begins with the next step"),
    ],
    ids=lambda value: value.waits_for if isinstance(value, Stats) else "",
)
def test_the_status_says_why_requests_wait_in_the_engine(stats: Stats, why: str) -> None:
    async def stats_of_engine(detail: bool = False) -> Stats:
        return stats

    async def run() -> None:
        async with running_daemon() as daemon:
            await daemon.service.load("tiny")
            daemon.engine.stats = stats_of_engine  # type: ignore[method-assign]
            daemon.engine.queued = [("a-0", 2.0), ("b-0", 1.0)]
            assert await waiting_of(daemon) == [
                {"id": "a-0", "seconds": 2.0, "why": why},
                {
                    "id": "b-0",
                    "seconds": 1.0,
                    "why": f"behind 1 waiting and {stats.num_running} running requests",
                },
            ]

    in_loop(run)()


@in_loop
async def test_nothing_holds_a_model_that_was_unloaded() -> None:
    async with running_daemon() as daemon:
        for path in ("/v1/completions", "/completion"):
            assert (await daemon.post(path, {"prompt": "hi", "max_tokens": 2, "n_predict": 2}))[0] == 200
        entry = daemon.service.models.entry("tiny")
        assert entry.model is not None
        model = weakref.ref(entry.model)
        del entry
        gc.disable()
        try:
            assert (await daemon.post("/quantd/unload", {"model": "tiny"}))[0] == 200
            await until_so(lambda: model() is None)
        finally:
            gc.enable()


@in_loop
async def test_requests_go_on_with_the_next_engine_if_theirs_dies_before_it_began_with_them() -> None:
    async with running_daemon() as daemon:
        await daemon.service.load("tiny")
        first = daemon.engine
        first.gate.clear()
        first.begins = False
        body = {"prompt": "hi", "max_tokens": 2}
        asked = [asyncio.create_task(daemon.post("/v1/completions", body)) for _ in range(3)]
        asked.append(asyncio.create_task(daemon.post("/v1/embeddings", {"input": ["a", "b"]})))
        await until_so(lambda: len(first.running) >= 5)
        first.died.set_result("the engine process was ended by SIGKILL")
        assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 4
        assert len(daemon.engines.started) == 2
        entry = daemon.service.models.entry("tiny")
        assert entry.model is not None and entry.model.num_requests == 0
