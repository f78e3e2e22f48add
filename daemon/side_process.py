"""A process for work that may never end or take all memory: it is asked, and lost if it does not answer."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from quantd.engine.connection import Connection

T = TypeVar("T")


class SideProcess:
    """Runs a command that answers frames on a socket, whose descriptor is its last argument."""

    def __init__(self, command: Sequence[str]) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self._process = subprocess.Popen(
                [*command, str(fd)], pass_fds=(fd,), stdin=subprocess.DEVNULL, start_new_session=True
            )
        self._connection = Connection(self._socket)

    def ask(self, request: msgspec.Struct, answers: msgspec.msgpack.Decoder[T], seconds: float) -> T:
        """Its answer. Raises TimeoutError, or EOFError or ConnectionError where the process has ended."""
        self._socket.settimeout(seconds)
        self._connection.send(request)
        return self._connection.receive(answers)

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._connection.close()
