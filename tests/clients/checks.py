"""What is asked of each client: an answer, streamed; a call of a tool when forced; an end when told."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from agents import Agent, Place
from isolation import MARK, end_all, new_mark
from recorder import Exchange, Recorder

ASK = "Say hello in one short sentence."
USE_TOOL = "Look at the file notes.txt in this folder."
TALK = "Write the longest story about the sea that you can."

_TASK_SECONDS = 240.0
_LEAVE_SECONDS = 10.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Outcome:
    """ok: None where the client has no such thing. note: what was seen, for people."""

    ok: bool | None
    note: str = ""


@dataclass(frozen=True)
class Bench:
    """What clients are tried with. make_place: a fresh one for a client, its settings for a model written."""

    recorder: Recorder
    status: Callable[[], Mapping[str, int]]
    variables: Mapping[str, str]
    make_place: Callable[[Agent, str], Place]


async def ask(bench: Bench, agent: Agent, model: str) -> tuple[Outcome, Outcome]:
    """Whether it connected, and whether the answer was streamed and shown."""
    bench.recorder.restart()
    place = await asyncio.to_thread(bench.make_place, agent, model)
    async with _running(bench, agent, place, ASK) as process:
        ended = await _within(_TASK_SECONDS, process.wait())
    answered = [exchange for exchange in bench.recorder.exchanges if exchange.status == 200]
    if not answered:
        return Outcome(False, _failure(bench.recorder, place)), Outcome(False)
    last = answered[-1]
    connected = Outcome(ended and process.returncode == 0, _usage_note(last))
    words = "".join(last.texts).split()
    shown = all(word in _output(place) for word in words[:3])
    return connected, Outcome(last.streamed and len(last.texts) > 1 and shown, f"{len(last.texts)} pieces")


async def force(bench: Bench, agent: Agent, model: str) -> Outcome:
    """Whether it runs a tool that the answer must call, and comes back with the result."""
    if agent.tool is None:
        return Outcome(None, "has no tools")
    bench.recorder.restart(forced=agent.tool)
    place = await asyncio.to_thread(bench.make_place, agent, model)

    def came_back() -> bool:
        exchanges = bench.recorder.exchanges
        called = set[str]().union(*(exchange.calls for exchange in exchanges))
        back = [e for e in exchanges if e.status == 200 and called & e.dialect.results(e.body)]
        return bool(back)

    async with _running(bench, agent, place, USE_TOOL) as process:
        await _until(_TASK_SECONDS, lambda: came_back() or process.returncode is not None)
    if came_back():
        return Outcome(True, agent.tool)
    if bench.recorder.forced is not None:
        return Outcome(False, f"offered no {agent.tool}")
    return Outcome(False, _failure(bench.recorder, place))


async def cancel(bench: Bench, agent: Agent, model: str) -> Outcome:
    """Whether Ctrl-C in the middle of an answer ends the work of the daemon."""
    bench.recorder.restart()
    place = await asyncio.to_thread(bench.make_place, agent, model)
    async with _running(bench, agent, place, TALK) as process:
        if not await _within(_TASK_SECONDS, bench.recorder.speaking.wait()):
            return Outcome(False, _failure(bench.recorder, place))
        told = time.monotonic()
        os.killpg(process.pid, signal.SIGINT)
        by_itself = await _until(_LEAVE_SECONDS, lambda: not bench.status()["num_running"])
        seconds = time.monotonic() - told
    if not by_itself:
        return Outcome(False, f"went on for {_LEAVE_SECONDS:.0f} s after Ctrl-C")
    if not any(exchange.left for exchange in bench.recorder.exchanges):
        return Outcome(False, "the answer was complete before")
    return Outcome(True, f"{seconds:.1f} s")


@contextlib.asynccontextmanager
async def _running(
    bench: Bench, agent: Agent, place: Place, prompt: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A client at work on a prompt; it and all that it started end with the block."""
    mark = new_mark()
    agent.prepare(place)
    command = agent.command(place, prompt)
    with (place.home / "output.txt").open("wb") as output:
        output.write(f"$ {shlex.join(command)}\n".encode())
        output.flush()
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=place.project,
            env={**bench.variables, **agent.variables(place), "HOME": str(place.home), MARK: mark},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            await asyncio.to_thread(end_all, mark)
            await process.wait()


def _output(place: Place) -> str:
    return (place.home / "output.txt").read_text(errors="replace")


def _usage_note(exchange: Exchange) -> str:
    """How long the prompt was."""
    for event in reversed(exchange.events):
        usage = event.get("usage") or event.get("response", {}).get("usage") or {}
        number = usage.get("prompt_tokens") or usage.get("input_tokens")
        if number:
            return f"{number} tokens in"
    return ""


def _failure(recorder: Recorder, place: Place) -> str:
    """What went wrong, as far as can be told: the daemon's error, else the client's last line."""
    for exchange in reversed(recorder.exchanges):
        if exchange.status >= 400:
            return f"{exchange.status}: {exchange.events[0]['error']['message']}"
    lines = [line for line in _output(place).splitlines()[1:] if line.strip()]
    return lines[-1][:200] if lines else "nothing came"


async def _within(seconds: float, awaitable: object) -> bool:
    """Whether something ended in time."""
    try:
        async with asyncio.timeout(seconds):
            await awaitable  # type: ignore[misc]
    except TimeoutError:
        return False
    return True


async def _until(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether something came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(_POLL_SECONDS)
    return True
