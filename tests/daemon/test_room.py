"""Who goes for another model: the choice, the wait, and the daemon's models and their pins."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from pathlib import Path

import pytest
from daemon_in_loop import in_loop
from hypothesis import given
from hypothesis import strategies as st
from scripted_engine import INFO
from test_model_lifecycle import models_of
from waiting import until_so

from quantd.daemon.errors import NoRoomError
from quantd.daemon.room import Resident, Room, leavers
from quantd.engine.config import Allowance
from quantd.engine.errors import CapacityError

GIB = 1 << 30
OVERHEAD = 256 << 20
SIZE = INFO.weight_bytes + INFO.kv_bytes


async def at_once() -> None:
    pass


def resident(name: str, gib: float, requests: int = 0, pinned: bool = False, used: float = 0) -> Resident:
    return Resident(name, int(gib * GIB), False, requests, pinned, used, at_once)


def names(models: object) -> list[str]:
    return [model.name for model in models]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("shortage", "expected"),
    [(0, "a"), (1, "a"), (1.2, "a"), (1.3, "b"), (3.5, "ab"), (3.6, "c"), (9, "bc"), (11, "abc"), (12, "")],
)
def test_the_least_recently_used_go_that_will_do_and_none_for_nothing(shortage: float, expected: str) -> None:
    models = [resident("a", 1), resident("b", 2), resident("c", 8)]
    assert names(leavers(models, int(shortage * GIB))) == list(expected)


@given(st.lists(st.integers(0, 10)), st.integers(1, 40))
def test_whoever_goes_is_needed(sizes: list[int], shortage: int) -> None:
    models = [resident(str(i), gib) for i, gib in enumerate(sizes)]
    freed = sum(model.num_bytes + OVERHEAD for model in models)
    going = leavers(models, shortage * GIB)
    assert bool(going) == (freed >= shortage * GIB)
    total = sum(model.num_bytes + OVERHEAD for model in going)
    for model in going:
        assert total >= shortage * GIB > total - model.num_bytes - OVERHEAD


@in_loop
async def test_models_in_other_memory_stay() -> None:
    gone: list[str] = []
    there = [
        dataclasses.replace(resident(name, 4, used=n), on_gpu=name < "c") for n, name in enumerate("abcd")
    ]

    async def unload(name: str) -> None:
        gone.append(name)

    room = Room(lambda: [model for model in there if model.name not in gone], unload, None, 0)
    await room.make(CapacityError("short", GIB, on_gpu=False), gone.count)
    await room.make(CapacityError("short", GIB, urgent=False, on_gpu=False), gone.count)
    assert gone == ["c", "d"]
    with pytest.raises(NoRoomError, match=r"short\nIn memory: a \(4.3 GB, idle\), b \(4.3 GB, idle\)"):
        await room.make(CapacityError("short", GIB, on_gpu=False), gone.count)
    await room.make(CapacityError("short", 6 * GIB), gone.count)
    assert gone == ["c", "d", "a", "b"]


def test_a_resident_is_told_with_its_size_and_what_holds_it() -> None:
    a = resident("a", 5, requests=2)
    assert str(a) == "a (5.4 GB, 2 requests)"
    assert str(dataclasses.replace(a, pinned=True)) == "a (5.4 GB, pinned)"
    assert str(dataclasses.replace(a, num_requests=0)) == "a (5.4 GB, idle)"


@in_loop
async def test_an_engine_that_is_short_of_memory_goes_on_when_others_have_left(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b c d") as (models, engines):
        for name in "abc":
            (await models.acquire(name)).release()
        engines.shortages.append(SIZE + OVERHEAD + 1)
        await models.acquire("d")
        assert [entry.name for entry in models.entries] == ["c", "d"]
        assert len(engines.configs) == 4, "the engine that asked for room is not started anew"


@in_loop
async def test_a_load_that_could_do_with_more_ends_idle_models_and_waits_for_nobody(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b c", memory_wait=30) as (models, engines):
        (await models.acquire("a")).release()
        await models.acquire("b")
        engines.urgent = False
        engines.shortages += [2 * (SIZE + OVERHEAD), 7, 7]
        await models.acquire("c")
        assert [entry.name for entry in models.entries] == ["b", "c"]


@in_loop
async def test_who_runs_or_is_pinned_stays_and_the_refusal_tells(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b c", pinned=["b"]) as (models, engines):
        await models.acquire("a")
        (await models.acquire("b")).release()
        engines.shortages.append(7)
        with pytest.raises(NoRoomError) as caught:
            await models.acquire("c")
        assert str(caught.value) == (
            "7 bytes are wanting\nIn memory: a (0.0 GB, 1 request), b (0.0 GB, pinned); "
            "waited 0 s for those in use (memory_wait)"
        )
        assert [entry.name for entry in models.entries] == ["a", "b"]


@in_loop
async def test_a_load_waits_for_memory_that_requests_hold_and_says_so(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b", memory_wait=30) as (models, engines):
        holder = await models.acquire("a")
        engines.shortages.append(7)
        waiting = asyncio.create_task(models.acquire("b"))
        await until_so(lambda: models.entries[-1].note == "waits for memory that requests of a hold")
        holder.release()
        assert (await waiting).name == "b"
        assert [entry.name for entry in models.entries] == ["b"]


@in_loop
async def test_nobody_waits_where_waiting_is_of_no_use(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b c", memory_wait=30) as (models, engines):
        (await models.acquire("a")).release()
        await models.acquire("b")
        engines.shortages.append(2 * (SIZE + OVERHEAD) + 1)
        with pytest.raises(NoRoomError):
            await asyncio.wait_for(models.acquire("c"), 20)
        assert [entry.name for entry in models.entries] == ["a", "b"], "and nobody has gone for it"


@in_loop
async def test_no_more_models_than_may_be(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b c d", max_models=2) as (models, _):
        for name in "abc":
            (await models.acquire(name)).release()
        assert [entry.name for entry in models.entries] == ["b", "c"]
        for name in "bc":
            await models.acquire(name)
        with pytest.raises(NoRoomError, match=r"2 models are in memory, no more may be \(max_models\)"):
            await models.acquire("d")


@in_loop
async def test_a_model_that_was_waited_for_is_used_before_it_goes_for_another(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b", max_models=1, memory_wait=30) as (models, engines):

        async def use(name: str) -> None:
            model = await models.acquire(name)
            await asyncio.sleep(0.005)
            model.release()

        await asyncio.gather(*(use(name) for name in "abababab"))
        assert len(engines.started) == 2


@in_loop
async def test_loads_take_turns(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b") as (models, engines):
        engines.release = asyncio.Event()
        waiting = [asyncio.create_task(models.acquire(name)) for name in "ab"]
        await until_so(
            lambda: {entry.note for entry in models.entries} == {"", "waits for another model to be loaded"}
        )
        assert len(engines.configs) == 1
        engines.release.set()
        await asyncio.gather(*waiting)


@in_loop
async def test_engines_are_told_what_others_have_been_promised(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b", max_memory=10 * SIZE) as (models, engines):
        await models.acquire("a")
        engines.started[0].blocks_touched = 16
        await models.acquire("b")
        allowances = [config.allowance for config in engines.configs]
        assert allowances[0] == Allowance(promised=0, limit=10 * SIZE)
        assert allowances[1] == Allowance(promised=INFO.kv_bytes * 48 // 64, limit=9 * SIZE)


@in_loop
async def test_a_pinned_model_outlasts_its_time_and_everybody_but_who_unloads_it(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b", keep_alive=0.01) as (models, _):
        await (await models.load("a", pin=True)).loaded()
        model = await models.acquire("a")
        model.release(0.01)
        await models.let_go("a")
        await asyncio.sleep(0.1)
        assert [entry.name for entry in models.entries] == ["a"]
        assert model.keep_alive.seconds_left == math.inf
        await models.unload("a")
        assert not models.entries and not models.is_pinned("a")
        (await models.acquire("a")).release()
        await until_so(lambda: not models.entries)
        await (await models.load("a", pin=True)).loaded()
        await models.load("a", pin=False)
        await models.let_go("a")
        assert not models.entries


@in_loop
async def test_a_pin_of_the_configuration_comes_back_with_the_model(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a", pinned=["a"]) as (models, _):
        for _ in range(2):
            await models.acquire("a")
            await models.unload("a")
            assert models.is_pinned("a")
