"""How long models stay: the policy on a clock of its own, durations, models on a real loop."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
from daemon_in_loop import in_loop
from fake_clock import FakeClock
from test_model_lifecycle import models_of

from quantd.daemon.durations import parse_duration
from quantd.daemon.keep_alive import KeepAlive


class Stay:
    """A model's stay of 900 seconds on a fake clock."""

    def __init__(self, seconds: float = 900) -> None:
        self.clock = FakeClock()
        self.expired = 0
        self.keep_alive = KeepAlive(seconds, self.expire, self.clock)

    def expire(self) -> None:
        self.expired += 1

    def request(self, seconds: float = 0, stay: float | None = None) -> None:
        """A request that takes so long."""
        self.keep_alive.stop()
        self.clock.pass_time(seconds)
        self.keep_alive.ask(stay)
        self.keep_alive.start()

    def expires_after(self, seconds: float) -> bool:
        """Whether it is there until just before so many seconds have passed, and no longer."""
        self.clock.pass_time(seconds - 1)
        early = self.expired
        self.clock.pass_time(1)
        return not early and self.expired == 1


def test_a_model_goes_when_it_has_been_idle_for_its_time() -> None:
    assert Stay().expires_after(900)
    used = Stay()
    used.clock.pass_time(800)
    used.request(seconds=5000)
    assert used.expires_after(900)


def test_one_timer_at_a_time_and_none_for_ever() -> None:
    stay = Stay()
    for _ in range(5):
        stay.request()
    assert stay.clock.num_timers == 1
    stay.request(stay=math.inf)
    assert stay.clock.num_timers == 0 and stay.keep_alive.seconds_left == math.inf
    assert Stay(math.inf).clock.num_timers == 0


def test_the_first_request_sets_the_time_and_others_lengthen_it() -> None:
    first = Stay()
    first.request(stay=10)
    assert first.expires_after(10)
    longer = Stay()
    longer.request(stay=10)
    longer.request(stay=3600)
    longer.request(stay=60)
    longer.request()
    assert longer.keep_alive.seconds_left == 3600
    assert longer.expires_after(3600)


def test_never_is_not_taken_back_by_another_request() -> None:
    stay = Stay()
    stay.request(stay=math.inf)
    stay.request(stay=300)
    stay.clock.pass_time(10**7)
    assert not stay.expired


def test_zero_lets_it_go_when_nothing_runs() -> None:
    stay = Stay()
    stay.request(stay=math.inf)
    stay.request(stay=0)
    assert stay.keep_alive.seconds_left == 0
    stay.clock.pass_time(0)
    assert stay.expired == 1


def test_what_runs_when_zero_is_asked_ends_first() -> None:
    stay = Stay()
    stay.keep_alive.stop()
    stay.keep_alive.ask(0)
    stay.clock.pass_time(5000)
    assert not stay.expired
    stay.keep_alive.ask()  # a request that was there before gives the model back
    stay.keep_alive.start()
    stay.clock.pass_time(0)
    assert stay.expired == 1


def test_a_request_after_zero_keeps_the_model() -> None:
    stay = Stay()
    stay.keep_alive.stop()
    stay.keep_alive.ask(0)
    stay.request()
    assert stay.expires_after(900)


def test_a_daemon_that_keeps_nothing_waits_for_the_first_request() -> None:
    assert Stay(0).expires_after(60)
    used = Stay(0)
    used.request()
    used.clock.pass_time(0)
    assert used.expired == 1


def test_the_time_left_while_a_request_runs() -> None:
    stay = Stay()
    stay.clock.pass_time(500)
    assert stay.keep_alive.seconds_left == 400
    stay.keep_alive.stop()
    stay.clock.pass_time(5000)
    assert stay.keep_alive.seconds_left == 900


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        (300, 300.0),
        (0, 0.0),
        ("0", 0.0),
        (1.5, 1.5),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("90", 90.0),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
        (1e300, math.inf),
        ("300000h", 1.08e9),
    ],
)
def test_durations(written: str | float, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize("text", ["", "m", "5 m", "5d", "1h 30m", "five", "--5m", "5m30", math.nan])
def test_what_is_no_duration(text: str | float) -> None:
    with pytest.raises(ValueError):
        parse_duration(text)


@in_loop
async def test_idle_models_are_unloaded_and_loaded_again(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b", keep_alive=0.02) as (models, engines):
        held = await models.acquire("b")
        (await models.acquire("a")).release(0.01)
        gone = models.entries[-1].gone
        assert models.entries[-1].name == "a"
        await gone.wait()
        assert engines.started[1].closed and not engines.started[0].closed
        assert [entry.name for entry in models.entries] == ["b"]
        again = await models.acquire("a")
        assert again.engine is engines.started[2]
        await asyncio.sleep(0.05)
        assert not again.engine.closed and not held.engine.closed


@in_loop
async def test_letting_go_waits_for_nobody_and_ends_no_work(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a") as (models, engines):
        await models.let_go("a")
        model = await models.acquire("a")
        await models.let_go("a")
        await asyncio.sleep(0.1)
        assert models.entries[0].state == "ready"
        model.release()
        await models.entries[0].gone.wait()
        assert engines.started[0].closed
        (await models.acquire("a")).release()
        await models.let_go("a")
        assert engines.started[1].closed and not models.entries


@in_loop
async def test_an_unload_goes_on_without_the_client_that_asked_for_it(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a") as (models, engines):
        model = await models.acquire("a")
        asking = asyncio.create_task(models.unload("a"))
        await asyncio.sleep(0.01)
        asking.cancel()
        model.release()
        assert (await models.acquire("a")).engine is engines.started[1]
