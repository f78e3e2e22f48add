"""Whether a grammar can be used, found out in a process of its own that may be lost."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from quantd.daemon.grammar_messages import Checked, CheckGrammar
from quantd.engine.connection import Connection
from quantd.engine.errors import RequestError

COMMAND = (sys.executable, "-P", "-m", "quantd.daemon.grammar_worker")
CHECK_SECONDS = 8.0


class GrammarChecker:
    """Checks grammars one at a time. Its process is started by the first one, and again after it was lost."""

    def __init__(self, seconds: float = CHECK_SECONDS, command: Sequence[str] = COMMAND) -> None:
        self._seconds = seconds
        self._command = command
        self._thread = ThreadPoolExecutor(1, "grammar check")
        self._worker: _Worker | None = None

    async def check(self, grammar: str, folder: Path, vocab_size: int, param: str) -> None:
        """Raise RequestError for `param` if the model of a folder cannot be held to a grammar."""
        request = CheckGrammar(grammar, str(folder), vocab_size)
        refusal = await asyncio.get_running_loop().run_in_executor(self._thread, self._ask, request)
        if refusal is not None:
            raise RequestError(f"{param}: {refusal}", param)

    async def close(self) -> None:
        """End the process, if there is one, when the check under way is done."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._drop)
        self._thread.shutdown()

    def _ask(self, request: CheckGrammar) -> str | None:
        if self._worker is None:
            self._worker = _Worker(self._command, self._seconds)
        try:
            return self._worker.ask(request).refusal
        except TimeoutError:
            self._drop()
            return f"it takes longer than {self._seconds:g} s to prepare"
        except (EOFError, ConnectionError):
            self._drop()
            return "it is too large or too deeply nested to prepare"

    def _drop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


class _Worker:
    """The process, and a socket to it that waits no longer than `seconds` for an answer."""

    def __init__(self, command: Sequence[str], seconds: float) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(seconds)
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [*command, str(fd)], pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._connection = Connection(self._socket)
        self._decoder = msgspec.msgpack.Decoder(Checked)

    def ask(self, request: CheckGrammar) -> Checked:
        """Raises TimeoutError, or EOFError or ConnectionError where the process has ended."""
        self._connection.send(request)
        return self._connection.receive(self._decoder)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()
