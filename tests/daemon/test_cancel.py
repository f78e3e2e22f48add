"""POST /quantd/cancel: a request ends, whatever is done for it, and its client is told why."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon
from waiting import until_so

HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
ASKED = {
    "/v1/chat/completions": HI | {"n": 2},
    "/v1/completions": {"model": "tiny", "prompt": ["hi", "ho"]},
    "/v1/embeddings": {"model": "tiny", "input": ["hi", "ho"]},
    "/v1/messages": HI | {"max_tokens": 99},
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/api/chat": HI | {"stream": False},
    "/completion": {"prompt": "hi"},
}


async def under_way(daemon: Daemon) -> list[dict[str, Any]]:
    return (await daemon.get("/quantd/status"))[1]["requests"]


async def cancel_when(daemon: Daemon, phase: str) -> None:
    """Cancel the request that is under way once it is so far."""
    while not (found := [request for request in await under_way(daemon) if request["phase"] == phase]):
        await asyncio.sleep(0.005)
    (request,) = found
    assert (await daemon.post("/quantd/cancel", {"id": request["id"]}))[0] == 200


@pytest.mark.parametrize("path", ASKED)
@in_loop
async def test_a_request_that_runs_is_ended_on_every_surface(path: str) -> None:
    async with running_daemon() as daemon:
        await daemon.service.load("tiny")
        daemon.engine.gate.clear()
        asking = asyncio.create_task(daemon.post(path, ASKED[path]))
        await cancel_when(daemon, "prefill")
        status, answer = await asking
        assert status == 410 and "the request was cancelled" in str(answer["error"])
        assert not daemon.engine.running and await under_way(daemon) == []
        daemon.engine.gate.set()
        assert (await daemon.post("/v1/chat/completions", HI | {"max_tokens": 3}))[0] == 200


@in_loop
async def test_a_request_that_waits_for_its_model_is_ended() -> None:
    async with running_daemon() as daemon:
        daemon.engines.release = asyncio.Event()
        asking = asyncio.create_task(daemon.post("/v1/chat/completions", HI))
        await cancel_when(daemon, "loading")
        assert (await asking)[0] == 410 and await under_way(daemon) == []
        daemon.engines.release.set()
        assert (await daemon.post("/v1/chat/completions", HI | {"max_tokens": 3}))[0] == 200


@in_loop
async def test_a_stream_says_that_it_was_cancelled() -> None:
    async with running_daemon() as daemon:
        await daemon.service.load("tiny")
        daemon.engine.gate.clear()
        asking = asyncio.create_task(daemon.stream("/v1/chat/completions", HI | {"stream": True}))
        await cancel_when(daemon, "prefill")
        frames = (await asking).strip().split("\n\n")
        assert '"code":"cancelled"' in frames[-1] and "[DONE]" not in frames[-1]
        assert len(daemon.engine.aborted) == 1


@in_loop
async def test_others_go_on_and_an_unknown_name_is_told() -> None:
    async with running_daemon() as daemon:
        await daemon.service.load("tiny")
        daemon.engine.gate.clear()
        other = asyncio.create_task(daemon.post("/v1/chat/completions", HI | {"max_tokens": 3}))
        await until_so(lambda: daemon.engine.running)
        status, answer = await daemon.post("/quantd/cancel", {"id": "req_0"})
        assert status == 404 and "req_0" in answer["error"]["message"]
        daemon.engine.gate.set()
        assert (await other)[0] == 200
