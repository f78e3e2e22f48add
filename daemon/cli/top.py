"""`quantd top`: what the daemon does, live."""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from quantd.daemon.cli.client import DaemonClient, find_daemon
from quantd.daemon.cli.hangup import hangup_ends_the_block
from quantd.daemon.cli.options import client_options
from quantd.daemon.config import client_sockets
from quantd.daemon.errors import DaemonError, NoDaemonError

_ESCAPE = b"\x1b"
_QUIT_KEYS = b"qQ\x04"  # also Ctrl-D
# Longer than an engine's longest step, after which the daemon answers without it.
_LOOK_SECONDS = 10.0


@click.command("top")
@client_options
@click.option("--once", is_flag=True, help="Print it once, as is done where the output is no terminal.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each look.")
@click.option(
    "--interval",
    type=click.FloatRange(0.1, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two looks.",
)
def top_command(socket: str | None, host: str | None, once: bool, as_json: bool, interval: float) -> None:
    """Show models, requests and the KV cache, live; q quits."""
    looks = _Looks(socket, host)
    if as_json:
        _print_json(looks, once, interval)
    elif once or not sys.stdout.isatty():
        _print_once(looks)
    else:
        with suppress(KeyboardInterrupt):
            _show(looks, interval)


class _Looks:
    """Asks the daemon that answers, whichever that is by then."""

    def __init__(self, socket: str | None, host: str | None) -> None:
        self._socket = socket
        self._host = host
        self._client: DaemonClient | None = None

    def status(self) -> Any:
        """What it says of itself. Raises DaemonError, NoDaemonError."""
        if self._client is None:
            self._client = find_daemon(client_sockets(self._socket), self._host)
        try:
            return self._client.get("/quantd/status", _LOOK_SECONDS)
        except (DaemonError, NoDaemonError):
            self._client = None
            raise


def _print_json(looks: _Looks, once: bool, interval: float) -> None:
    """A line a look. A daemon that is gone for a while is waited for."""
    while True:
        try:
            click.echo(json.dumps(looks.status(), separators=(",", ":")))
        except (DaemonError, NoDaemonError):
            if once:
                raise
        if once:
            return
        sys.stdout.flush()
        time.sleep(interval)


def _print_once(looks: _Looks) -> None:
    from rich.console import Console  # 0.1 s, which JSON does not need

    from quantd.daemon.cli.top_view import as_ascii, screen

    console = Console(highlight=False)
    with console.capture() as captured:
        console.print(screen(looks.status(), {}, console.width, None))
    text = captured.get()
    click.echo(text if console.encoding.startswith("utf") else as_ascii(text), nl=False)


def _show(looks: _Looks, interval: float) -> None:
    from rich.console import Console  # as above
    from rich.live import Live

    from quantd.daemon.cli.top_view import no_daemon, rates_between, screen

    console = Console(highlight=False)
    before, looked = None, 0.0
    with _terminal_keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            now = time.monotonic()
            try:
                status = looks.status()
            except (DaemonError, NoDaemonError) as error:
                status = None
                view = no_daemon(str(error))
            else:
                rates = rates_between(before, status, now - looked)
                view = screen(status, rates, console.width, console.height)
            before, looked = status, now
            live.update(view, refresh=True)
            if pressed(interval):
                return


@contextmanager
def _terminal_keys() -> Iterator[Any]:
    """A function that waits so many seconds for a key that quits. The terminal is as before afterwards."""
    import termios  # not everywhere, and for terminals alone

    fd = sys.stdin.fileno() if sys.stdin.isatty() else None
    saved = None if fd is None else termios.tcgetattr(fd)
    with hangup_ends_the_block():
        try:
            if fd is not None:
                _read_key_by_key(fd)
            yield lambda seconds: _pressed(fd, seconds)
        finally:
            if fd is not None and saved is not None:
                termios.tcsetattr(fd, termios.TCSAFLUSH, saved)


def _read_key_by_key(fd: int) -> None:
    """No echo, no waiting for a line; and no Ctrl-Z, which would leave the screen as it is."""
    import termios

    attributes = termios.tcgetattr(fd)
    attributes[3] &= ~(termios.ICANON | termios.ECHO)
    attributes[6][termios.VMIN], attributes[6][termios.VTIME] = 1, 0
    attributes[6][termios.VSUSP] = bytes([os.fpathconf(fd, "PC_VDISABLE")])
    termios.tcsetattr(fd, termios.TCSAFLUSH, attributes)


def _pressed(fd: int | None, seconds: float) -> bool:
    """Whether a key that quits comes within so many seconds."""
    if fd is None:
        time.sleep(seconds)
        return False
    deadline = time.monotonic() + seconds
    while select.select([fd], [], [], max(deadline - time.monotonic(), 0))[0]:
        keys = os.read(fd, 64)
        # Other keys' codes begin with Esc too.
        is_plain = keys == _ESCAPE or not keys.startswith(_ESCAPE)
        if not keys or (is_plain and any(key in _QUIT_KEYS + _ESCAPE for key in keys)):
            return True
    return False
