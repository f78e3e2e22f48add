"""How a rank ends: when rank 0 has hung up, whatever befell it, and without being freed."""

from __future__ import annotations

import socket
import subprocess
import sys

import msgspec
import pytest
from waiting import PATIENCE

from quantd.engine.connection import Connection
from quantd.engine.messages import Failed
from quantd.engine.rank_messages import FromRank

# Freed, it waits, as a group of GPUs does while steps that were recorded with it are there.
CLINGING = """
import sys, time
from quantd.engine import errors, worker

class Group:
    def __del__(self):
        time.sleep(600)

def run(connection):
    group = Group()
    raise {error}

worker._run = run
worker.serve(int(sys.argv[1]))
"""


@pytest.mark.parametrize(
    ("error", "told", "status"),
    [
        ("ZeroDivisionError('oh')", [Failed("ZeroDivisionError", "ZeroDivisionError: oh")], 1),
        ("errors.RankError('rank 0 is late')", [], 1),
        ("EOFError", [], 0),
    ],
    ids=["fault", "lost", "closed"],
)
def test_a_rank_ends_when_rank_0_hangs_up(error: str, told: list[Failed], status: int) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            command = [sys.executable, "-c", CLINGING.format(error=error), str(theirs.fileno())]
            process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        ours.settimeout(PATIENCE)
        connection, decoder = Connection(ours), msgspec.msgpack.Decoder[FromRank](FromRank)
        try:
            assert [connection.receive(decoder) for _ in told] == told
            ours.shutdown(socket.SHUT_WR)
            assert process.wait(PATIENCE) == status
        finally:
            process.kill()
            process.wait()
