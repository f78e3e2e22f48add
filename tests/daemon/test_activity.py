"""What the daemon tells of the requests under way, and the names that they go by."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

import aiohttp
import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon
from waiting import until_so

from quantd.daemon.activity import Activity, Peer, Progress, RequestRecord
from quantd.daemon.metrics import Metrics
from quantd.daemon.status import request_statuses
from quantd.engine.messages import Queue, RequestStats, Stats
from quantd.engine.request import Request, SamplingParams, TokenEvent

HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


async def requests_of(daemon: Daemon) -> list[dict[str, Any]]:
    return (await daemon.get("/quantd/status"))[1]["requests"]


async def until_phase(daemon: Daemon, phase: str) -> dict[str, Any]:
    while True:
        match await requests_of(daemon):
            case [request] if request["phase"] == phase:
                return request
        await asyncio.sleep(0.005)


@in_loop
async def test_a_request_is_followed_from_its_load_to_its_end() -> None:
    async with running_daemon() as daemon:
        daemon.engines.release = asyncio.Event()
        headers = {"X-Request-ID": "mine-1", "User-Agent": "Zed/0.200 (linux)"}

        async def post() -> aiohttp.ClientResponse:
            url = "http://x/v1/chat/completions"
            return await daemon.session.post(url, json=HI | {"n": 2}, headers=headers)

        asked = asyncio.create_task(post())
        request = await until_phase(daemon, "loading")
        assert (request["id"], request["model"]) == ("mine-1", "tiny")
        assert request["why"].startswith("tiny is loading")
        assert request["route"] == "POST /v1/chat/completions"
        client = request["client"]
        assert (client["id"], client["pid"]) == (f"uid:{os.getuid()}", os.getpid())
        assert client["agent"] == "Zed/0.200 (linux)" and client["name"].startswith(("python", "pytest"))
        daemon.engines.release.set()
        response = await asked
        assert response.headers["x-request-id"] == response.headers["request-id"] == "mine-1"
        daemon.engine.gate.clear()
        asked = asyncio.create_task(post())
        await until_so(lambda: daemon.engine.running)
        request = await until_phase(daemon, "prefill")
        assert request["choices"] == 2
        assert 0 < request["computed_tokens"] < request["prompt_tokens"]
        for queue, phase in (("waiting", "waiting"), ("held", "grammar")):
            daemon.engine.queue = queue  # type: ignore[assignment]
            assert (await requests_of(daemon))[0]["phase"] == phase
        _, status = await daemon.get("/quantd/status")
        assert status["models"][0]["pool"] == {"blocks_per_cell": 32, "held": [4, 0], "cached": [0, 0]}
        assert "requests" not in status["models"][0]["stats"]
        daemon.engine.gate.set()
        assert (await asked).status == 200
        assert await requests_of(daemon) == []


@in_loop
async def test_a_running_answer_tells_its_tokens_and_its_rate() -> None:
    async with running_daemon() as daemon:
        body = HI | {"stream": True, "max_tokens": 400}
        async with daemon.session.post("http://x/v1/chat/completions", json=body) as response:
            await response.content.readline()
            request = await until_phase(daemon, "decode")
            assert request["computed_tokens"] == request["prompt_tokens"] > 0
            assert request["cached_tokens"] == request["prompt_tokens"] // 2
            assert request["output_tokens"] > 0
        await daemon.settle()
        assert await requests_of(daemon) == []


@in_loop
async def test_embeddings_are_followed_too() -> None:
    async with running_daemon() as daemon:
        await daemon.service.load("tiny")
        daemon.engine.gate.clear()
        asked = asyncio.create_task(
            daemon.post("/v1/embeddings", {"model": "tiny", "input": ["a b c", "d e"]})
        )
        request = await until_phase(daemon, "prefill")
        assert request["choices"] == 2 and request["route"] == "POST /v1/embeddings"
        daemon.engine.gate.set()
        assert (await asked)[0] == 200
        assert await requests_of(daemon) == []


@in_loop
async def test_work_in_the_background_outlasts_its_exchange() -> None:
    async with running_daemon() as daemon:
        await daemon.service.load("tiny")
        daemon.engine.gate.clear()
        body = {"model": "tiny", "input": "hi", "background": True, "max_output_tokens": 3}
        status, answer = await daemon.post("/v1/responses", body)
        assert (status, answer["status"]) == (200, "in_progress")
        request = await until_phase(daemon, "prefill")
        assert request["route"] == "POST /v1/responses"
        daemon.engine.gate.set()
        while await requests_of(daemon):
            await asyncio.sleep(0.005)


@in_loop
async def test_looking_is_not_listed_and_failures_leave_nothing() -> None:
    async with running_daemon() as daemon:
        assert await requests_of(daemon) == []
        for path, body, expected in (
            ("/v1/chat/completions", HI | {"model": "nosuch"}, 404),
            ("/v1/chat/completions", HI | {"messages": 7}, 400),
            ("/v1/completions", {"model": "tiny", "prompt": [1] * 600}, 400),
        ):
            assert (await daemon.post(path, body))[0] == expected
            assert await requests_of(daemon) == []
        await daemon.service.load("tiny")
        daemon.engine.gate.clear()
        await daemon.leave("/v1/chat/completions", HI)
        assert await requests_of(daemon) == []


@in_loop
async def test_every_answer_has_its_requests_name() -> None:
    async with running_daemon() as daemon, aiohttp.ClientSession() as session:
        base = f"http://127.0.0.1:{daemon.port}"
        for given, taken in (
            ("a1b2-c3.d4:e/f", True),
            ("x" * 128, True),
            ("x" * 129, False),
            ("two words", False),
            ("", False),
            ('"}\\u0000', False),
        ):
            for path in ("/health", "/nosuch", "/v1/models/nosuch"):
                async with session.get(base + path, headers={"X-Request-ID": given}) as response:
                    name = response.headers["x-request-id"]
                    assert (name == given) == taken, given
                    assert taken or name.startswith("req_")
        async with session.post(base + "/v1/messages", data=b"{", headers={"x-request-id": "n1"}) as answer:
            assert (answer.status, answer.headers["request-id"]) == (400, "n1")
            assert (await answer.json())["request_id"] == "n1"


def make_progress(tokens: int = 0) -> Progress:
    work = Progress(Request(id="a", prompt=[1] * 10, sampling=SamplingParams()), Metrics().of("m"))
    for _ in range(tokens):
        time.sleep(0.001)
        work.note(TokenEvent(request_id="a", token_ids=[5], num_cached=4 if not work.num_tokens else None))
    return work


def test_the_farthest_choice_tells_the_phase() -> None:
    record = RequestRecord("r", Peer())

    def phase(queue: Queue | None = None) -> str:
        if queue is None:
            return request_statuses([record], {}, {})[0].phase
        state = RequestStats(id="a", queue=queue, num_tokens=10, num_computed=6, num_blocks=1)
        return request_statuses([record], {"m": Stats(requests=[state])}, {})[0].phase

    assert phase() == "loading"
    record.got_model("m")
    assert phase() == "preparing"
    record.works.append(make_progress())
    assert (phase("held"), phase("waiting")) == ("grammar", "waiting")
    assert (phase("running"), phase()) == ("prefill", "prefill")
    record.works.append(make_progress(tokens=3))
    assert phase("waiting") == "decode"
    for work in record.works:
        work.end("stop")
    assert phase() == "sending"


def test_those_that_wait_say_why() -> None:
    record = RequestRecord("r", Peer())
    record.model = "m"
    reasons = {"m": "m is loading, 5 %", "a": "behind 2 running requests"}

    def why(queue: Queue) -> str | None:
        state = RequestStats(id="a", queue=queue, num_tokens=10, num_computed=6, num_blocks=1)
        return request_statuses([record], {"m": Stats(requests=[state])}, reasons)[0].why

    assert why("waiting") == "m is loading, 5 %"
    record.got_model("m")
    assert why("waiting") is None, "its prompt is made"
    record.works.append(make_progress())
    assert (why("waiting"), why("running")) == ("behind 2 running requests", None)


def test_rates_are_those_of_the_answer() -> None:
    record = RequestRecord("r", Peer())
    record.works.append(make_progress(tokens=1))
    assert request_statuses([record], {}, {})[0].tokens_per_second is None
    record.works.append(make_progress(tokens=5))
    work = record.works[-1]
    assert work.first is not None
    (status,) = request_statuses([record], {}, {})
    assert status.tokens_per_second == pytest.approx(4 / (work.latest - work.first))
    assert (status.prompt_tokens, status.cached_tokens, status.output_tokens) == (20, 8, 6)


def test_a_request_without_http_is_followed_too() -> None:
    ended: list[str] = []
    activity = Activity()
    activity.on_end.append(lambda record: ended.append(record.id))
    record = activity.join("m", "uid:7")
    assert activity.requests == [record]
    record.release()
    assert activity.requests == [] and ended == [record.id]


@pytest.mark.parametrize(
    ("client", "name"),
    [
        (Peer(program="zed", agent="curl/8"), "zed"),
        (Peer(address="127.0.0.1", agent="OpenAI/Python 2.1"), "OpenAI"),
        (Peer(address="127.0.0.1"), "127.0.0.1"),
        (Peer(), "unknown"),
    ],
)
def test_clients_have_names(client: Peer, name: str) -> None:
    assert client.name == name
