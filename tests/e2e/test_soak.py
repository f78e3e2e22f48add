"""Held under load: many clients for a while leave nothing behind; then the daemon is at rest.

SOAK_SECONDS, SOAK_CLIENTS: longer and more than in the suite (`make soak`).
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from homes import add_tiny
from soak_load import REQUESTS, Tally, after, load
from test_daemon import Served, descriptors, no_more, serve
from waiting import until

SECONDS = float(os.environ.get("SOAK_SECONDS", "8"))
NUM_CLIENTS = int(os.environ.get("SOAK_CLIENTS", "200"))
MOST_ROUNDS = 4
MOST_RESTS = 3
REST_SECONDS = float(os.environ.get("REST_SECONDS", "10"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = add_tiny(tmp_path_factory.mktemp("home"), "tiny")
    with serve(home, "tiny", "--kv-memory", "8MiB", "--max-num-tokens", "256") as daemon:
        yield daemon


def processes(served: Served) -> list[psutil.Process]:
    return [psutil.Process(served.process.pid), served.engine()]


def memory(served: Served) -> int:
    return sum(process.memory_full_info().uss for process in processes(served))


def one_round(served: Served, seconds: float) -> tuple[Tally, int, list[int]]:
    """What the clients saw, and the memory and descriptors when they are gone."""
    tally = asyncio.run(load(served.path, NUM_CLIENTS, after(seconds)))
    served.wait_idle()
    assert tally.odd == []
    return tally, memory(served), descriptors(processes(served))


def test_two_hundred_clients_leave_nothing(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    _, before, descriptors_before = one_round(served, SECONDS / 2)
    # What the largest step yet has made of the heap may come and go, so that a round can end above the one
    # before; a leak has every round do so.
    for _ in range(MOST_ROUNDS):
        tally, now, _ = one_round(served, SECONDS)
        if now < 1.02 * before:
            break
        before = now
    else:
        pytest.fail(f"every round ends with more memory than the one before, this one with {now}")
    until(lambda: no_more(descriptors(processes(served)), descriptors_before), "descriptors are as before")
    assert tally.left
    with capsys.disabled():
        counts = ", ".join(f"{count} x {status}" for status, count in sorted(tally.statuses.items()))
        first = "/".join(f"{tally.percentile(share):.2f}" for share in (0.5, 0.99))
        print(f"\n{NUM_CLIENTS} clients, {SECONDS:g} s: {counts}, {tally.left} left; TTFT p50/p99 {first} s")


def wakeups(served: Served) -> int:
    """How often threads of the daemon and its engine have begun to wait."""
    folders = (Path(f"/proc/{process.pid}/task") for process in processes(served))
    statuses = (thread.read_text() for folder in folders for thread in folder.glob("*/status"))
    return sum(int(text.split("\nvoluntary_ctxt_switches:")[1].split()[0]) for text in statuses)


def cpu_seconds(served: Served) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes(served))


def test_at_rest_it_does_nothing(served: Served) -> None:
    served.wait_idle()
    time.sleep(3)
    # Helpers of the load before end once; what comes again and again does so each time.
    counts = list[tuple[int, float]]()
    while not counts or not is_rest(*counts[-1]):
        assert len(counts) < MOST_RESTS, counts
        before, used = wakeups(served), cpu_seconds(served)
        time.sleep(REST_SECONDS)
        counts.append((wakeups(served) - before, cpu_seconds(served) - used))


def is_rest(num_wakeups: int, seconds: float) -> bool:
    """The clock of processes ticks in hundredths of a second."""
    return num_wakeups <= max(1, REST_SECONDS / 10) and seconds <= max(0.011, REST_SECONDS / 1000)


def is_busy(served: Served) -> bool:
    with served.http() as http:
        models = http.get("/quantd/status").json()["models"]
    return any(model["stats"]["num_running"] for model in models)


def kill_a_busy_engine(served: Served) -> None:
    until(lambda: is_busy(served), "some request runs")
    old = served.engine()
    old.kill()
    until(lambda: not old.is_running(), "it is gone")
    # The third death within a minute stops the model until somebody wants it all the same.
    with served.http() as http:
        assert b'"ready"' in http.post("/quantd/load", json={"model": "tiny"}).content


def test_ten_killed_engines_under_load(served: Served) -> None:
    """What ran is told so, what waited goes to the next engine; nothing is left of any."""
    asyncio.run(load(served.path, 1, after(2), REQUESTS))
    served.wait_idle()
    before = descriptors(processes(served))

    async def kill_ten() -> None:
        for _ in range(10):
            await asyncio.to_thread(kill_a_busy_engine, served)

    async def both() -> Tally:
        killing = asyncio.create_task(kill_ten())
        tally = await load(served.path, 12, killing.done, REQUESTS)
        await killing
        return tally

    tally = asyncio.run(both())
    assert set(tally.statuses) <= {200, 503}, tally.statuses
    assert all(odd.endswith(": 503") for odd in tally.odd), tally.odd
    served.wait_idle()
    assert served.complete({"prompt": [40], "max_tokens": 3})["usage"]["completion_tokens"] == 3
    until(lambda: no_more(descriptors(processes(served)), before), "descriptors are as before")
