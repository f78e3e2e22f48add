"""Models in memory: one load for many, failures, evictions, deaths, unloading."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from daemon_in_loop import in_loop
from fake_models import write_model
from scripted_engine import Engines, FakeStore

from quantd.daemon.errors import ModelNotFoundError
from quantd.daemon.models import Models
from quantd.engine.config import EngineConfig
from quantd.engine.errors import CapacityError, EngineDiedError
from quantd.quant.errors import CheckpointError


@contextlib.asynccontextmanager
async def models_of(
    folder: Path, names: str, default: str | None = None, keep_alive: float = math.inf, **limits: Any
) -> AsyncIterator[tuple[Models, Engines]]:
    store, engines = FakeStore(), Engines()
    for name in names.split():
        store.add(name, write_model(folder / name))
    models = Models(
        store,
        engines.start,
        lambda path, options: EngineConfig(model_path=str(path), **options),
        default,
        drain_seconds=0.05,
        keep_alive=keep_alive,
        **limits,
    )
    yield models, engines
    await models.close()
    assert not models.entries
    assert all(engine.died.done() for engine in engines.started)


@in_loop
async def test_concurrent_requests_share_one_load(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a") as (models, engines):
        loaded = await asyncio.gather(*(models.acquire("a") for _ in range(5)))
        assert len(engines.started) == 1
        assert {model.engine for model in loaded} == {engines.started[0]}
        assert loaded[0].num_requests == 5


@in_loop
async def test_a_load_tells_the_log_how_many_tokens_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with models_of(tmp_path, "a") as (models, engines):
            await models.acquire("a")
            info = engines.started[0].info
    assert f"a is loaded: llama on {info.backend} kernels" in caplog.text
    assert f"KV cache of {info.kv_tokens} tokens" in caplog.text


@in_loop
async def test_a_failed_load_fails_all_who_wait_and_is_tried_again(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a") as (models, engines):
        engines.failures.append(CheckpointError("shard 2 is missing"))
        results = await asyncio.gather(*(models.acquire("a") for _ in range(3)), return_exceptions=True)
        assert [str(result) for result in results] == ["shard 2 is missing"] * 3
        assert not models.entries
        assert (await models.acquire("a")).name == "a"


@in_loop
async def test_a_waiter_that_leaves_does_not_end_the_load(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a") as (models, engines):
        engines.release = asyncio.Event()
        first = asyncio.create_task(models.acquire("a"))
        second = asyncio.create_task(models.acquire("a"))
        await asyncio.sleep(0.01)
        first.cancel()
        engines.release.set()
        assert (await second).num_requests == 1


@in_loop
async def test_a_dead_engine_is_replaced_by_the_next_request(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a") as (models, engines):
        (await models.acquire("a")).release()
        engines.started[0].died.set_result("killed")
        assert (await models.acquire("a")).engine is engines.started[1]
        engines.started[1].died.set_result("killed")
        await asyncio.sleep(0)
        assert not models.entries


@in_loop
async def test_memory_is_made_by_unloading_the_longest_idle_model(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b c d") as (models, engines):
        for name in "abc":
            await models.acquire(name)
        models.entries[0].model.release()
        models.entries[1].model.release()
        (await models.acquire("a")).release()  # now b is the one that idles longest
        engines.failures.append(CapacityError("no room"))
        await models.acquire("d")
        assert [entry.name for entry in models.entries] == ["c", "a", "d"]
        engines.failures += [CapacityError("no room"), CapacityError("no room at all")]
        with pytest.raises(CapacityError, match="at all"):
            await models.acquire("b")
        assert [entry.name for entry in models.entries] == ["c", "d"]


@pytest.mark.parametrize(
    ("names", "default", "loaded", "expected"),
    [("a", None, "", "a"), ("a b", "b", "", "b"), ("a b", "b", "a", "a"), ("a b c", None, "a b", "b")],
)
def test_the_model_at_hand(
    tmp_path: Path, names: str, default: str | None, loaded: str, expected: str
) -> None:
    async def resolve() -> None:
        async with models_of(tmp_path, names, default) as (models, _):
            for name in loaded.split():
                await models.acquire(name)
            for asked in (None, "default"):
                assert (await models.acquire(asked)).name == expected

    in_loop(resolve)()


@in_loop
async def test_no_model_at_hand(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a b") as (models, _):
        with pytest.raises(ModelNotFoundError, match="a, b"):
            await models.acquire(None)
        with pytest.raises(ModelNotFoundError):
            await models.acquire("c")
        with pytest.raises(ModelNotFoundError, match="not loaded"):
            await models.unload("a")


@in_loop
async def test_unloading_waits_for_requests_then_ends_the_engine(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a") as (models, engines):
        model = await models.acquire("a")
        unloading = asyncio.create_task(models.unload("a"))
        await asyncio.sleep(0.01)
        assert models.entries[0].state == "unloading" and not engines.started[0].closed
        again = asyncio.create_task(models.acquire("a"))
        model.release()
        await unloading
        assert engines.started[0].closed
        assert (await again).engine is engines.started[1]
        await models.unload("a")  # the request that holds it outlasts the drain
        assert engines.started[1].closed


@in_loop
async def test_unloading_stops_a_load(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a") as (models, engines):
        engines.release = asyncio.Event()
        waiting = asyncio.create_task(models.acquire("a"))
        await asyncio.sleep(0.01)
        await models.unload("a")
        with pytest.raises(EngineDiedError, match="unloaded"):
            await waiting


@in_loop
async def test_progress_is_seen_by_every_watcher(tmp_path: Path) -> None:
    async with models_of(tmp_path, "a") as (models, engines):
        engines.release = asyncio.Event()
        entry = await models.open("a", {"kv_dtype": "fp32"})

        async def watch() -> list[tuple[int, int]]:
            return [progress async for progress in entry.watch()]

        watchers = [asyncio.create_task(watch()) for _ in range(2)]
        await asyncio.sleep(0.05)
        engines.release.set()
        for seen in await asyncio.gather(*watchers):
            assert seen == sorted(seen) and seen[-1] == (1000, 1000)
        assert engines.configs[0].kv_dtype == "fp32"
