"""What the processes of an engine say on stderr. For how lines look in a journal see test_daemon_logs.py."""

from __future__ import annotations

import re
import socket
import subprocess
import sys

import pytest
from waiting import PATIENCE


def said_to_garbage(module: str) -> str:
    """What the process of a module prints when it is sent a frame that it cannot read."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", module, str(theirs.fileno())]
    with ours, theirs:
        process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stderr=subprocess.PIPE)
        theirs.close()
        ours.sendall(b"\x01\x00\x00\x00\xc1")
        ours.shutdown(socket.SHUT_WR)
        _, errors = process.communicate(timeout=PATIENCE)
    return errors.decode()


@pytest.mark.parametrize(
    ("module", "name"), [("quantd.engine.loop", "engine"), ("quantd.engine.worker", "rank")]
)
def test_lines_have_time_level_and_process(module: str, name: str) -> None:
    first, *_ = said_to_garbage(module).splitlines()
    assert re.match(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d [A-Z]+ {name} \d+: ", first), first
