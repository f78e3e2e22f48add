"""Engines that hang are noticed by their steps and ended; GPUs are let go before the machine sleeps."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec
from daemon_in_loop import in_loop, running_daemon
from scripted_engine import INFO

from quantd.daemon.pulse import Pulse
from quantd.engine.messages import Stats


@dataclass
class Engine:
    """Answers with `stats_now`, at once or when `answers` is set; keeps the reason that it was ended
    for, and dies of it if it can.
    """

    stats_now: Stats | None
    dies: bool = True
    died: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    ended: list[str] = field(default_factory=list)
    answers: asyncio.Event = field(default_factory=asyncio.Event)

    async def stats(self) -> Stats:
        if self.stats_now is None:
            await self.answers.wait()
        assert self.stats_now is not None
        return self.stats_now

    def kill(self, reason: str) -> None:
        self.ended.append(reason)
        if self.dies:
            self.died.set_result(reason)


async def looked_at(engine: Engine, seconds: float = 0.3) -> Pulse:
    """For so long that one that stands still is ended."""
    pulse = Pulse("a", engine, 0.05)
    pulse.start()
    await asyncio.sleep(seconds)
    return pulse


@in_loop
async def test_an_engine_that_does_not_answer_is_ended_once() -> None:
    engine = Engine(None)
    pulse = await looked_at(engine, 0.3)
    assert len(engine.ended) == 1 and "stood still for 0.05 s" in engine.ended[0]
    assert not pulse.is_stuck


@in_loop
async def test_steps_that_stand_still_are_a_hang_though_it_answers() -> None:
    engine = Engine(Stats(num_running=1, steps=7), dies=False)
    pulse = await looked_at(engine, 0.4)
    assert len(engine.ended) == 1
    assert pulse.is_stuck, "ended, but still there"


@in_loop
async def test_steps_that_go_on_and_queues_that_wait_are_none() -> None:
    waiting = Engine(Stats(num_waiting=3, steps=7))
    pulse = await looked_at(waiting, 0.3)
    pulse.stop()
    going_on = Engine(Stats(num_running=1))
    pulse = Pulse("a", going_on, 0.05)
    pulse.start()
    for step in range(30):
        going_on.stats_now = Stats(num_running=1, steps=step)
        await asyncio.sleep(0.01)
    pulse.stop()
    assert not waiting.ended and not going_on.ended


def test_an_engine_is_not_ended_because_the_daemon_was_stopped() -> None:
    """As both are by a terminal or a service manager, and go on together."""

    async def stop_and_go_on() -> None:
        engine = Engine(None)
        pulse = Pulse("a", engine, 0.4)
        pulse.start()
        await asyncio.sleep(0.15)
        time.sleep(1)
        await asyncio.sleep(0.02)
        engine.stats_now = Stats(num_running=1, steps=1)
        engine.answers.set()
        await asyncio.sleep(0.02)
        assert not engine.ended
        pulse.stop()

    asyncio.run(stop_and_go_on())


@in_loop
async def test_an_idle_engine_is_not_looked_at() -> None:
    engine = Engine(None)
    pulse = Pulse("a", engine, 0.02)
    pulse.start()
    pulse.stop()
    await asyncio.sleep(0.1)
    assert not engine.ended


@in_loop
async def test_gpus_are_let_go_before_a_sleep_and_taken_again_after_it() -> None:
    """What runs is told; what comes meanwhile waits for the end of the sleep; models of a CPU stay."""
    async with running_daemon() as daemon:
        body = {"prompt": "hi", "max_tokens": 1}
        await daemon.post("/v1/completions", body)
        assert await daemon.post("/quantd/sleep", {}) == (200, {"unloaded": []})
        assert (await daemon.post("/v1/completions", body))[0] == 200
        assert await daemon.post("/quantd/wake", {}) == (200, {"status": "awake"})
        daemon.engines.info = msgspec.structs.replace(INFO, backend="gpu sm_90 fp16")
        await daemon.post("/quantd/unload", {"model": "tiny"})
        await daemon.post("/v1/completions", body)
        held = daemon.engine
        assert await daemon.post("/quantd/sleep", {}) == (200, {"unloaded": ["tiny"]})
        assert held.closed
        asking = asyncio.create_task(daemon.post("/v1/completions", body))
        await asyncio.sleep(0.05)
        assert not asking.done() and daemon.engine is held
        await daemon.post("/quantd/wake", {})
        status, _ = await asking
        assert status == 200 and daemon.engine is not held


@in_loop
async def test_a_sleep_whose_end_is_never_told_ends(monkeypatch) -> None:
    monkeypatch.setattr("quantd.daemon.sleep._LONGEST_SECONDS", 0.05)
    async with running_daemon() as daemon:
        await daemon.post("/quantd/sleep", {})
        status, _ = await daemon.post("/v1/completions", {"prompt": "hi", "max_tokens": 1})
        assert status == 200
