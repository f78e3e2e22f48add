"""Whether a grammar can be used, found out in a process of its own that may be lost."""

from __future__ import annotations

import asyncio
import hashlib
import math
import signal
import sys
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from quantd.daemon.errors import OverloadedError
from quantd.daemon.grammar_messages import Checked, CheckGrammar
from quantd.engine.child import Child
from quantd.engine.connection import encode_frame, read_frame
from quantd.engine.errors import RequestError

COMMAND = (sys.executable, "-P", "-m", "quantd.daemon.grammar_worker")

_MOST_KEPT = 256
_MOST_TRIES = 2
_LOST = Checked("it is too large or too deeply nested to prepare")


@dataclass(frozen=True)
class CheckLimits:
    """In seconds: what a check may take, how long it may wait for others, how long what took too long is
    refused without another try, and how long the process stays with nothing to do.
    """

    check_seconds: float = 8.0
    wait_seconds: float = 10.0
    refused_seconds: float = 30.0
    idle_seconds: float = 60.0


class GrammarChecker:
    """Checks grammars one at a time, and keeps what was found of the latest.

    The process is started by the first that is new, and ends when it is idle.
    """

    def __init__(self, limits: CheckLimits = CheckLimits(), command: Sequence[str] = COMMAND) -> None:
        self._limits = limits
        self._command = command
        self._turn = asyncio.Lock()
        self._found = _Found()
        self._child: Child | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._endings: set[asyncio.Task[int]] = set()

    async def check(self, grammar: str, folder: Path, vocab_size: int, param: str) -> None:
        """Raise RequestError for `param` if the model of a folder cannot be held to a grammar.

        Raises OverloadedError where other grammars take all the time.
        """
        request = CheckGrammar(grammar, str(folder), vocab_size)
        checked = self._found.get(request) or await self._find_in_turn(request)
        if checked.refusal is not None:
            raise RequestError(f"{param}: {checked.refusal}", param)

    def forget(self, folder: Path) -> None:
        """Forget a model that is no longer in memory: other files may lie there when it comes back."""
        self._found.forget(str(folder))
        if not self._turn.locked():
            self._let_go()

    async def close(self) -> None:
        """End the process, if there is one; no check is under way."""
        self._let_go()
        await asyncio.gather(*self._endings)

    async def _find_in_turn(self, request: CheckGrammar) -> Checked:
        try:
            async with asyncio.timeout(self._limits.wait_seconds):
                await self._turn.acquire()
        except TimeoutError:
            raise OverloadedError("other grammars take long to prepare; try again later") from None
        try:
            return self._found.get(request) or await self._find(request)
        finally:
            self._turn.release()

    async def _find(self, request: CheckGrammar) -> Checked:
        """Ask the process. One that the system or a person has ended is started once more."""
        self._stop_timer()
        for _ in range(_MOST_TRIES):
            child = self._child = self._child or await Child.start(self._command)
            try:
                async with asyncio.timeout(self._limits.check_seconds):
                    checked = await _ask(child, request)
            except TimeoutError:
                await self._kill(child)
                taken = f"it takes longer than {self._limits.check_seconds:g} s to prepare"
                return self._found.put(request, Checked(taken), self._limits.refused_seconds)
            except (EOFError, ConnectionError):
                self._child = None
                if await child.end() != -signal.SIGKILL:
                    return self._found.put(request, _LOST)
            except asyncio.CancelledError:
                # Its answer must not be taken for another's.
                await self._kill(child)
                raise
            else:
                self._start_timer()
                return self._found.put(request, checked)
        return _LOST

    async def _kill(self, child: Child) -> None:
        self._child = None
        await child.kill()

    def _start_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._limits.idle_seconds, self._let_go)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _let_go(self) -> None:
        """Have the process end, which has nothing to do."""
        self._stop_timer()
        if self._child is not None:
            ending = asyncio.create_task(self._child.end())
            self._endings.add(ending)
            ending.add_done_callback(self._endings.discard)
            self._child = None


async def _ask(child: Child, request: CheckGrammar) -> Checked:
    """Raises EOFError or ConnectionError where the process has ended."""
    child.writer.write(encode_frame(request))
    return msgspec.msgpack.decode(await read_frame(child.reader), type=Checked)


class _Key(NamedTuple):
    folder: str
    digest: bytes


class _Found:
    """What was found of the latest grammars; they themselves, which may be long, are not kept."""

    def __init__(self) -> None:
        self._kept: OrderedDict[_Key, tuple[Checked, float]] = OrderedDict()

    def get(self, request: CheckGrammar) -> Checked | None:
        """What is known of a grammar, which is used by this."""
        checked, until = self._kept.get(_key(request), (None, 0.0))
        if checked is None or until <= time.monotonic():
            return None
        self._kept.move_to_end(_key(request))
        return checked

    def put(self, request: CheckGrammar, checked: Checked, seconds: float = math.inf) -> Checked:
        """Keep what was found, for so long."""
        self._kept[_key(request)] = checked, time.monotonic() + seconds
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return checked

    def forget(self, folder: str) -> None:
        """Drop what is known for a model."""
        for key in [key for key in self._kept if key.folder == folder]:
            del self._kept[key]


def _key(request: CheckGrammar) -> _Key:
    return _Key(request.folder, hashlib.blake2b(encode_frame(request), digest_size=16).digest())
