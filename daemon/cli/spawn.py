"""A daemon for the length of one command, for when none runs; nothing of it is left afterwards."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from quantd.daemon.cli.client import DaemonClient, find_daemon
from quantd.daemon.cli.hangup import hangup_ends_the_block
from quantd.daemon.cli.output import spinner
from quantd.daemon.config import client_sockets
from quantd.daemon.errors import DaemonError, NoDaemonError

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_MAX_LOG_BYTES = 10 * 2**20
_PR_SET_PDEATHSIG = 1


@contextmanager
def daemon_for_command(socket: str | None, host: str | None, log: Path) -> Iterator[DaemonClient]:
    """The daemon that runs, else one of our own. One that was asked for by address has to run already."""
    try:
        client = find_daemon(client_sockets(socket), host)
    except NoDaemonError:
        if socket is not None or host is not None:
            raise
        with own_daemon(log) as client:
            yield client
    else:
        yield client


@contextmanager
def own_daemon(log: Path) -> Iterator[DaemonClient]:
    """Start a daemon on a Unix socket of its own; end it with the block. Its output is appended to `log`.

    Raises DaemonError with the end of the log if it does not come up.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    _rotate(log)
    with tempfile.TemporaryDirectory(prefix="quantd-") as folder, log.open("ab") as output:
        socket = Path(folder) / "api.sock"
        output.write(time.strftime("--- %Y-%m-%d %H:%M:%S quantd serve, for one command\n").encode())
        output.flush()
        with hangup_ends_the_block():
            process = _start(socket, output.fileno())
            try:
                with spinner("starting a daemon ..."):
                    _wait_until_healthy(process, DaemonClient(socket), log)
                yield DaemonClient(socket)
            finally:
                _stop(process)


def _rotate(log: Path) -> None:
    """Begin anew where the file is large; what was in it is kept once."""
    if log.exists() and log.stat().st_size > _MAX_LOG_BYTES:
        log.replace(log.with_name(f"{log.name}.1"))


def _start(socket: Path, output: int) -> subprocess.Popen[bytes]:
    """A session of its own keeps the terminal's Ctrl-C, which is for the answer, away from the daemon."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def die_with_parent() -> None:
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)

    return subprocess.Popen(
        [
            sys.executable,
            "-P",
            "-m",
            "quantd.daemon.cli.main",
            "serve",
            "--socket",
            str(socket),
            "--port",
            "off",
        ],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=die_with_parent,
    )


def _wait_until_healthy(process: subprocess.Popen[bytes], client: DaemonClient, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise DaemonError(f"The daemon did not start: {_last_line(log)} (all of it: {log})")
        try:
            client.get("/quantd/version")
        except NoDaemonError:
            time.sleep(0.05)
        else:
            return
    raise DaemonError(f"The daemon did not answer within {_START_SECONDS:g} seconds; see {log}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM asks the daemon to drain, the second one to leave at once."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        process.send_signal(number)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        return


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no reason given")
