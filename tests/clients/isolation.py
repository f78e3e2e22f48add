"""Keeping clients to themselves: no network but loopback, no home but their own, no process that stays.

A network namespace has nothing in it but a loopback interface (network_namespaces(7)), so that whatever a
client would like to tell or fetch, it cannot.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import struct
import subprocess
import time
import uuid
from collections.abc import Sequence

import psutil

MARK = "QUANTD_CLIENTS_RUN"
"""A variable that all processes of a run inherit; its value names the run."""

_SIOCSIFFLAGS = 0x8914  # linux/sockios.h
_IFF_UP = 1
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net")
_END_SECONDS = 5.0


def can_isolate() -> bool:
    """Whether this user may make a network namespace here."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_UNSHARE, "true"], capture_output=True, check=False).returncode == 0


def run_isolated(command: Sequence[str]) -> int:
    """Run a program without any network; the exit status."""
    return subprocess.run([*_UNSHARE, *command], check=False).returncode


def bring_up_loopback() -> None:
    """Switch on the one interface of a fresh network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", _IFF_UP))


def new_mark() -> str:
    """A name for a run."""
    return uuid.uuid4().hex


def end_all(mark: str) -> int:
    """End every process of a run, also those that left their parents; how many there were."""
    found = _marked(mark)
    for process in found:
        _signal(process, signal.SIGTERM)
    deadline = time.monotonic() + _END_SECONDS
    while (left := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        _signal(process, signal.SIGKILL)
    return len(found)


def _marked(mark: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter() if _mark_of(process) == mark]


def _mark_of(process: psutil.Process) -> str | None:
    try:
        if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
            return None
        return process.environ().get(MARK)
    except (psutil.Error, OSError):
        return None


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.Error):
        process.send_signal(number)
