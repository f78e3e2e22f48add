"""A wall clock that jumps, as after a sleep or by NTP: nothing but the dates in answers follows it."""

from __future__ import annotations

import json
import mmap
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from homes import add_tiny
from test_daemon import CHAT, STORY, Served, serve

DAY = 24 * 3600


class Clock:
    """The wall clock of processes that were started with it."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8)

    def set(self, seconds: int) -> None:
        """Have it go before the real one by so much."""
        struct.pack_into("=q", self._memory, 0, seconds)


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clock]:
    folder = tmp_path_factory.mktemp("clock")
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler to build the clock with")
    source, library = Path(__file__).with_name("clock_shift.c"), folder / "clock.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source], check=True)
    with pytest.MonkeyPatch.context() as patch:
        clock = Clock(folder / "shift")
        patch.setenv("CLOCK_SHIFT", str(folder / "shift"))
        patch.setenv("LD_PRELOAD", str(library))
        yield clock


@pytest.fixture(scope="module")
def served(clock: Clock, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = add_tiny(tmp_path_factory.mktemp("home"), "tiny")
    with serve(home, "tiny", "--kv-memory", "8MiB", "--keep-alive", "5m") as daemon:
        yield daemon


def created(served: Served) -> int:
    return int(served.complete({"model": "tiny", "prompt": [40], "max_tokens": 1})["created"])


@pytest.mark.parametrize("jump", [40 * DAY, -40 * DAY])
def test_a_stream_goes_on_and_the_model_stays(clock: Clock, served: Served, jump: int) -> None:
    clock.set(0)
    engine = served.engine().pid
    body = {"model": "tiny", "messages": STORY, "max_tokens": 300, "stream": True, "ignore_eos": True}
    with served.http() as http, http.stream("POST", CHAT, json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        clock.set(jump)
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert json.loads(rest[-4].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert abs(created(served) - time.time() - jump) < 60
    time.sleep(0.5)
    assert served.engine().pid == engine


def test_metrics_hold_no_time_that_cannot_be(clock: Clock, served: Served) -> None:
    clock.set(0)
    for jump in (40 * DAY, -40 * DAY, 0):
        clock.set(jump)
        created(served)
    with served.http() as http:
        lines = http.get("/metrics").text.splitlines()
    sums = {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines) if "_sum" in name}
    assert sums and all(0 <= value < DAY for value in sums.values()), sums
