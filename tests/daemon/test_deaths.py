"""Engines that die again and again: the count, and what the daemon's models make of it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from daemon_in_loop import in_loop
from fake_clock import FakeClock
from test_model_lifecycle import models_of

from quantd.daemon.deaths import Deaths
from quantd.daemon.errors import EngineStoppedError
from quantd.daemon.wire.errors import fault_of
from quantd.engine.errors import EngineDiedError


def test_three_deaths_within_a_minute_stop_a_model_until_it_is_cleared() -> None:
    clock = FakeClock()
    deaths = Deaths(clock.time)
    for pause in (0, 29, 29):
        deaths.check("a")
        clock.pass_time(pause)
        deaths.note("a", f"killed after {pause}")
    with pytest.raises(EngineStoppedError, match=r"3 times within 60 s.*killed after 29.*quantd load a"):
        deaths.check("a")
    deaths.check("b")
    clock.pass_time(10**6)
    assert deaths.stopped == {"a": "killed after 29"}
    deaths.clear("a")
    deaths.check("a")
    deaths.note("a", "killed")
    assert not deaths.stopped


def test_deaths_far_apart_stop_nothing() -> None:
    clock = FakeClock()
    deaths = Deaths(clock.time)
    for _ in range(10):
        deaths.note("a", "killed")
        clock.pass_time(31)
    assert not deaths.stopped


@in_loop
async def test_a_model_whose_engine_dies_too_often_is_refused_until_it_is_loaded(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b") as (models, engines):
        for _ in range(3):
            (await models.acquire("a")).release()
            engines.started[-1].died.set_result("killed")
            await asyncio.sleep(0)
        with pytest.raises(EngineStoppedError, match="killed") as caught:
            await models.acquire("a")
        assert (fault_of(caught.value).status, fault_of(caught.value).code) == (503, "engine_stopped")
        (await models.acquire("b")).release()
        await (await models.load("a")).loaded()
        assert (await models.acquire("a")).engine is engines.started[-1]


@in_loop
async def test_an_engine_that_dies_in_its_load_is_started_again_for_those_who_wait(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a") as (models, engines):
        engines.failures += [EngineDiedError("killed")] * 2
        waiting = [asyncio.create_task(models.acquire("a")) for _ in range(3)]
        assert len({id(model.engine) for model in await asyncio.gather(*waiting)}) == 1
        assert len(engines.configs) == 3
        await models.unload("a")
        engines.failures.append(EngineDiedError("killed"))
        with pytest.raises(EngineStoppedError):
            await models.acquire("a")
