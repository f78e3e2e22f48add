"""Chat templates run in a process of their own: `python -m quantd.daemon.template_process FD`.

A template is a program, from a model's folder or from a client. The sandbox bounds what it can reach, but not
its time and memory, nor does any check of it: one product of texts can take both in a single instruction. So
what outstays its time or its memory is ended with the process, and the event loop never waits for it.
"""

from __future__ import annotations

import json
import resource
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from quantd.daemon.side_process import SideProcess
from quantd.daemon.templates import run_template
from quantd.engine.connection import Connection
from quantd.engine.errors import RequestError
from quantd.engine.parent import die_with_parent

COMMAND = (sys.executable, "-P", "-m", "quantd.daemon.template_process")
RENDER_SECONDS = 5.0
START_SECONDS = 60.0
IDLE_SECONDS = 600.0
MEMORY_BYTES = 2 << 30


class Body(msgspec.Struct, frozen=True):
    """Either side's frame: JSON in ASCII, which takes numbers and lone surrogates as they come."""

    text: bytes


class TemplateProcess:
    """Runs one template at a time. Its process is started by the first one, and again after it was lost.

    A process that nobody asks ends by itself. Every method blocks; threads may call them.
    """

    def __init__(self, seconds: float = RENDER_SECONDS, command: Sequence[str] = COMMAND) -> None:
        self._seconds = seconds
        self._command = command
        self._lock = threading.Lock()
        self._answers = msgspec.msgpack.Decoder(Body)
        self._process: SideProcess | None = None
        self._asked = 0.0

    def __call__(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text of a template. Raises RequestError where it refuses, fails or takes too much."""
        body = Body(json.dumps([source, variables]).encode())
        with self._lock:
            try:
                answer = self._started().ask(body, self._answers, self._seconds)
            except TimeoutError:
                self._drop()
                reason = f"takes longer than {self._seconds:g} s on these messages"
            except (EOFError, ConnectionError):
                self._drop()
                reason = "takes too much memory on these messages"
            else:
                text, refusal = json.loads(answer.text)
                if refusal is None:
                    return str(text)
                raise RequestError(refusal, "messages")
        raise RequestError(f"the model's chat template {reason}", "messages")

    def close(self) -> None:
        """End the process, if there is one, when what it does is done."""
        with self._lock:
            self._drop()

    def _started(self) -> SideProcess:
        last, self._asked = self._asked, time.monotonic()
        if self._asked - last > IDLE_SECONDS / 2:  # it may be about to end
            self._drop()
        if self._process is None:
            self._process = SideProcess(self._command)
            self._process.ask(Body(json.dumps(["", {}]).encode()), self._answers, START_SECONDS)
        return self._process

    def _drop(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def serve(fd: int) -> None:
    """Answer on a socket's descriptor until the other side is gone, or long silent."""
    ours = socket.socket(fileno=fd)
    ours.settimeout(IDLE_SECONDS)
    connection, decoder = Connection(ours), msgspec.msgpack.Decoder(Body)
    try:
        while True:
            answer = _answer(connection.receive(decoder).text)
            connection.send(Body(json.dumps(answer).encode()))
    except (EOFError, ConnectionError, TimeoutError):
        return


def _answer(body: bytes) -> tuple[str | None, str | None]:
    """A template's text, or why there is none."""
    try:
        source, variables = json.loads(body)
        return run_template(source, variables), None
    except RequestError as error:
        return None, str(error)
    except RecursionError:
        return None, "messages: what they hold is nested too deeply"


if __name__ == "__main__":
    die_with_parent()
    for kind, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(kind, (most, most))
    serve(int(sys.argv[1]))
