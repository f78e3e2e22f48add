from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from fakes import FATAL_TOKEN, continuation, make_info, make_request
from processes import own_children
from waiting import PATIENCE, run_steadily

from quantd.engine.client import EngineClient
from quantd.engine.config import Allowance, EngineConfig
from quantd.engine.errors import (
    CapacityError,
    ContextLengthError,
    EngineDiedError,
    NotBegunError,
    RequestError,
)
from quantd.engine.request import Request, TokenEvent
from quantd.quant.errors import CheckpointError

TESTS = Path(__file__).parents[1]
COMMAND = [sys.executable, str(TESTS / "fake_engine.py")]
INFO = make_info(num_blocks=4096)


@asynccontextmanager
async def running(model_path: str = "0") -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(EngineConfig(model_path=model_path), command=COMMAND)
    try:
        yield client
    finally:
        await client.close()
        assert not psutil.pid_exists(client.pid)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A coroutine as a test."""

    def wrapped() -> None:
        run_steadily(test())

    wrapped.__name__ = test.__name__
    return wrapped


async def collect(client: EngineClient, request: Request) -> list[TokenEvent]:
    return [event async for event in client.generate(request)]


def tokens(events: list[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


async def until(condition: Callable[[], Coroutine[Any, Any, bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.01)


@run
async def test_load_progress_info_and_a_stream() -> None:
    seen: list[tuple[int, int]] = []
    client = await EngineClient.start(
        EngineConfig(model_path="0"), lambda *progress: seen.append(progress), command=COMMAND
    )
    try:
        assert seen == [(1, 3), (2, 3), (3, 3)]
        assert client.info == INFO
        request = make_request("a", [1, 2, 3], max_tokens=5)
        events = await collect(client, request)
        assert tokens(events) == continuation(request, INFO)[0]
        assert (await client.stats()).generated_tokens == 5
        for name, cached in (("b", 0), ("c", 8)):
            assert (await collect(client, make_request(name, [1] * 9, max_tokens=1)))[0].num_cached == cached
        client.forget([1] * 9)
        assert (await collect(client, make_request("d", [1] * 9, max_tokens=1)))[0].num_cached == 0
        assert not client.died.done()
    finally:
        await client.close()
    assert client.died.result() == "the engine was closed"
    await client.close()


@run
async def test_a_hundred_streams_at_once() -> None:
    requests = [make_request(f"r{n}", [n % 50, *range(n % 30)], max_tokens=1 + n % 20) for n in range(100)]
    async with running() as client:
        results = await asyncio.gather(*(collect(client, request) for request in requests))
        stats = await client.stats()
    assert [tokens(events) for events in results] == [continuation(request, INFO)[0] for request in requests]
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total


@run
async def test_closing_or_cancelling_a_stream_aborts_its_request() -> None:
    async with running("0.01") as client:

        async def nothing_runs() -> bool:
            stats = await client.stats()
            return stats.num_running + stats.num_waiting == 0

        async with aclosing(client.generate(make_request("closed", [1]))) as stream:
            await anext(stream)
        await until(nothing_runs)
        task = asyncio.create_task(collect(client, make_request("cancelled", [2])))
        await until(lambda: is_running(client, 1))
        task.cancel()
        await until(nothing_runs)
        stats = await client.stats()
        assert stats.aborts == 2
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
        await collect(client, make_request("closed", [1], max_tokens=1))


async def is_running(client: EngineClient, count: int) -> bool:
    return (await client.stats()).num_running == count


@run
async def test_a_stream_read_to_its_end_aborts_nothing() -> None:
    async with running() as client:
        async with aclosing(client.generate(make_request("a", [1], max_tokens=1))) as stream:
            assert (await anext(stream)).finish_reason == "length"
        assert (await client.stats()).aborts == 0


@run
async def test_what_cannot_be_served_is_refused_before_it_is_sent() -> None:
    async with running() as client:
        with pytest.raises(ContextLengthError) as caught:
            client.generate(make_request("a", [1] * 1024))
        assert (caught.value.prompt_len, caught.value.limit) == (1024, 1024)
        with pytest.raises(RequestError, match="token id -1"):
            client.generate(make_request("a", [-1]))


@run
async def test_a_killed_engine_ends_every_stream_with_the_reason() -> None:
    async with running("0.01") as client:
        tasks = [asyncio.create_task(collect(client, make_request(f"r{n}", [n]))) for n in range(5)]
        await until(lambda: is_running(client, 5))
        os.kill(client.pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, EngineDiedError) for result in results)
        assert "SIGKILL" in str(results[0])
        assert "SIGKILL" in await client.died
        for call in (lambda: collect(client, make_request("late", [1])), client.stats):
            with pytest.raises(EngineDiedError, match="SIGKILL"):
                await call()


@run
async def test_requests_that_a_killed_engine_had_not_begun_are_told_apart() -> None:
    config = EngineConfig(model_path="0.01", max_num_requests=2)
    client = await EngineClient.start(config, command=COMMAND)
    tasks = [asyncio.create_task(collect(client, make_request(f"r{n}", [n]))) for n in range(5)]
    await until(lambda: is_running(client, 2))
    stats = await client.stats()
    assert (stats.num_waiting, stats.waits_for) == (3, "seat")
    assert [id for id, seconds in client.unbegun if seconds < 30] == ["r2", "r3", "r4"]
    os.kill(client.pid, signal.SIGKILL)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDiedError] * 2 + [NotBegunError] * 3
    with pytest.raises(NotBegunError, match="SIGKILL"):
        client.generate(make_request("late", [1]))
    await client.close()
    assert client.unbegun == []


@run
async def test_closing_fails_requests_that_had_not_begun_too() -> None:
    config = EngineConfig(model_path="0.01", max_num_requests=1)
    client = await EngineClient.start(config, command=COMMAND)
    tasks = [asyncio.create_task(collect(client, make_request(f"r{n}", [n]))) for n in range(2)]
    await until(lambda: is_running(client, 1))
    await client.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [EngineDiedError] * 2


@run
async def test_a_load_that_is_short_of_memory_waits_for_room() -> None:
    asked: list[tuple[str, int]] = []

    async def make_room(error: CapacityError) -> Allowance:
        asked.append((str(error), error.shortage))
        return Allowance(promised=2 - len(asked), limit=32)

    client = await EngineClient.start(EngineConfig(model_path="short"), None, make_room, command=COMMAND)
    assert asked == [("7 bytes are wanting", 7)] * 2 and client.info.num_blocks == 32
    await client.close()

    async def refuse(error: CapacityError) -> Allowance:
        raise error

    for make in (refuse, None):
        with pytest.raises(CapacityError, match="7 bytes") as caught:
            await EngineClient.start(EngineConfig(model_path="short"), None, make, command=COMMAND)
        assert caught.value.shortage == 7
    assert own_children() == []


@run
async def test_closing_ends_running_streams() -> None:
    async with running("0.01") as client:
        task = asyncio.create_task(collect(client, make_request("a", [1])))
        await until(lambda: is_running(client, 1))
        await client.close()
        with pytest.raises(EngineDiedError, match="closed"):
            await task


@run
async def test_a_step_that_fails_twice_in_a_row_ends_the_process_with_its_reason() -> None:
    """At once: nobody waits until the runner is freed."""
    async with running() as client:
        for name in ("a", "b"):
            (event,) = await collect(client, make_request(name, [FATAL_TOKEN]))
            assert (event.finish_reason, event.error) == (
                "error",
                "the step failed: RuntimeError: the step broke",
            )
        assert "the step broke" in await client.died


@pytest.mark.parametrize(
    ("model_path", "error", "message"),
    [
        ("damaged", CheckpointError, "^shard 2 is missing$"),
        ("too big", CapacityError, "MemoryError"),
        ("too big for torch", CapacityError, "allocate"),
        ("buggy", EngineDiedError, "ZeroDivisionError: oh"),
        ("exits", EngineDiedError, "status 3"),
    ],
)
def test_a_load_that_fails_raises_its_reason(model_path: str, error: type[Exception], message: str) -> None:
    async def start() -> None:
        await EngineClient.start(EngineConfig(model_path=model_path), command=COMMAND)

    with pytest.raises(error, match=message):
        asyncio.run(start())
    assert own_children() == []


@run
async def test_a_cancelled_load_leaves_no_process() -> None:
    loading = asyncio.Event()
    task = asyncio.create_task(
        EngineClient.start(EngineConfig(model_path="hangs"), lambda *_: loading.set(), command=COMMAND)
    )
    await loading.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert own_children() == []


def test_a_stopped_process_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantd.engine.child.END_SECONDS", 0.2)

    async def stop_and_close() -> None:
        async with running() as client:
            os.kill(client.pid, signal.SIGSTOP)

    asyncio.run(stop_and_close())


@run
async def test_an_interrupt_is_ignored_and_idle_costs_nothing() -> None:
    async with running() as client:
        os.kill(client.pid, signal.SIGINT)
        await collect(client, make_request("a", [1], max_tokens=2))
        await asyncio.sleep(0.1)
        before = activity(client.pid)
        await asyncio.sleep(1)
        assert activity(client.pid) == before


def activity(pid: int) -> tuple[float, dict[str, list[str]]]:
    """CPU seconds of a process, and how often each of its threads was switched to."""
    times = psutil.Process(pid).cpu_times()
    switches = {
        task.name: [line for line in (task / "status").read_text().splitlines() if "ctxt" in line]
        for task in Path(f"/proc/{pid}/task").iterdir()
    }
    return times.user + times.system, switches


PARENT = """
import asyncio, sys
sys.path.insert(0, sys.argv[1])
from quantd.engine.client import EngineClient
from quantd.engine.config import EngineConfig

async def main():
    command = [sys.executable, sys.argv[1] + "/fake_engine.py"]
    started = asyncio.Event()
    task = asyncio.create_task(
        EngineClient.start(EngineConfig(model_path=sys.argv[2]), lambda *_: started.set(), command=command)
    )
    await (started.wait() if sys.argv[2] == "hangs" else task)
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("model_path", ["0", "hangs"])
def test_the_engine_dies_with_its_parent(model_path: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(TESTS), model_path], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
    gone, _ = psutil.wait_procs([child], timeout=PATIENCE)
    assert gone


def test_the_client_imports_nothing_heavy() -> None:
    heavy = ("torch", "numpy", "transformers")
    code = f"import sys, quantd.engine.client; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
