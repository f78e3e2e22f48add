"""Rank 0's hold on the other ranks: it starts them, sends them every step, and hears when one ends.

Each is a child process (quantd.engine.worker) at the other end of a socketpair. Torch-free.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TypeVar

import msgspec

from quantd.engine.config import EngineConfig
from quantd.engine.connection import Connection, encode_frame
from quantd.engine.errors import RankError
from quantd.engine.messages import Failed
from quantd.engine.rank_messages import (
    FromRank,
    Prepared,
    RankLoaded,
    RankReady,
    Reserved,
    StartRank,
    ToRank,
)
from quantd.engine.split import World

# -P: a file of the working directory must not pass for a module of the engine.
RANK_COMMAND = (sys.executable, "-P", "-m", "quantd.engine.worker")
_EXIT_SECONDS = 5.0
_NEWS_SECONDS = 5.0

Fail = Callable[[Failed], None]
T = TypeVar("T", RankLoaded, RankReady, Prepared, Reserved)


class Ranks:
    """The ranks of an engine but for rank 0.

    fail: called once, from any thread, with the reason, when a rank ends or cannot go on.
    """

    def __init__(self, config: EngineConfig, world: World, fail: Fail) -> None:
        self._fail = fail
        self._answers: SimpleQueue[FromRank] = SimpleQueue()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._store = os.memfd_create("quantd-ranks")
        self._processes = [_RankProcess(rank, self._store, self._hear) for rank in range(1, world.size)]
        for process in self._processes:
            self._send_to([process], StartRank(config, world, process.rank, self.store))

    @property
    def store(self) -> str:
        """Path of the file in which all ranks find each other. It has no name, and ends with them."""
        return f"/proc/self/fd/{self._store}"

    def send(self, message: ToRank) -> None:
        """The same to all. Raises RankError where one is gone."""
        self._send_to(self._processes, message)

    def collect(self, kind: type[T], time_limit: float | None = None) -> list[T]:
        """Wait for one answer of each, in any order, so many seconds for the next at most.

        Raises RankError where one fails or is late.
        """
        found: list[T] = []
        while len(found) < len(self._processes):
            try:
                answer = self._answers.get(timeout=time_limit)
            except Empty:
                raise RankError(f"a rank of this model has said nothing for {time_limit:g} s") from None
            if isinstance(answer, Failed):
                raise RankError(answer.message)
            assert isinstance(answer, kind), answer
            found.append(answer)
        return found

    def explain(self, error: Exception) -> RankError:
        """What to raise for an error of a step, after which the ranks are out of step: see `fail`.

        Ranks notice the loss of another by themselves; a little later it is known which one it was.
        """
        if isinstance(error, RankError):
            self._ended.wait(_NEWS_SECONDS)
        if self._reason is not None:
            return RankError(self._reason)
        return RankError(str(error) if isinstance(error, RankError) else f"rank 0: {error}")

    def close(self) -> None:
        """End all ranks and wait for their end, which is no failure then."""
        self._reason = "the ranks were closed"
        for process in self._processes:
            process.close()
        # The file stays open as long as this process lives: torch opens it by its path once more when the
        # group is gone, whenever that is, and another file must not have the descriptor's number by then.

    def _send_to(self, processes: Sequence[_RankProcess], message: ToRank) -> None:
        frame = encode_frame(message)
        try:
            for process in processes:
                process.socket.sendall(frame)
        except OSError as error:
            raise self.explain(RankError(f"a rank takes no more messages: {error}")) from error

    def _hear(self, message: FromRank) -> None:
        if isinstance(message, Failed):
            with self._lock:
                if self._reason is not None:
                    return
                self._reason = message.message
            self._fail(message)
            self._ended.set()
        self._answers.put(message)


class _RankProcess:
    """A rank's process, and a thread that hands on what it says; when it ends, a Failed with the reason."""

    def __init__(self, rank: int, store: int, hear: Callable[[FromRank], None]) -> None:
        self.rank = rank
        self.socket, theirs = socket.socketpair()
        with theirs:
            fds = (theirs.fileno(), store)
            command = [*RANK_COMMAND, str(theirs.fileno())]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds)
        self._listener = threading.Thread(target=self._listen, args=(hear,), name=f"rank {rank}", daemon=True)
        self._listener.start()

    def close(self) -> None:
        """Hang up, which ends the rank, and wait for its end; after a while, by force."""
        self.socket.shutdown(socket.SHUT_RDWR)
        self._listener.join()
        self.socket.close()

    def _listen(self, hear: Callable[[FromRank], None]) -> None:
        connection = Connection(self.socket)
        decoder = msgspec.msgpack.Decoder[FromRank](FromRank)
        try:
            while True:
                hear(connection.receive(decoder))
        except (EOFError, ConnectionError):
            hear(Failed(RankError.__name__, f"rank {self.rank} {_describe_end(self._reap())}"))

    def _reap(self) -> int:
        try:
            return self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _describe_end(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    hint = ", perhaps by the system for want of memory" if status == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-status).name}{hint}"
