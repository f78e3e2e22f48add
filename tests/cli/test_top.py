"""`quantd top`: what it shows, how it fits, and that it leaves the terminal as it was."""

from __future__ import annotations

import contextlib
import copy
import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import STATUS, FakeDaemon, Quantd, request
from rich.console import Console
from waiting import PATIENCE

from quantd.daemon.cli.top_view import Rates, as_ascii, pool_map, rates_between, screen


def rendered(status: dict[str, Any], width: int = 80, height: int | None = None, **rates: Rates) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    with console.capture() as captured:
        console.print(screen(status, rates, width, height))
    return captured.get()


def changed(**fields: Any) -> dict[str, Any]:
    return copy.deepcopy(STATUS) | fields


def test_fits_80_columns_and_says_what_matters() -> None:
    text = rendered(STATUS, tiny=Rates(120.25, 1530.0))
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines)
    for words in (
        "process 4194305",
        "up 1 min",
        "daemon 80.0 MB, engines 500.0 MB",
        "14.2 GB of 32.0 GB free",
    ):
        assert words in text
    for words in ("2 running, 1 waiting", "120 tok/s, prompts 1530 tok/s", "hits 75 %", "KV 480+320 of 1.6k"):
        assert words in text
    assert re.search(r"big  loading  25 %", text) and "unloads in 14 min" in text
    rows = [line for line in lines if line.split()[:1] and line.split()[0] in ("zed", "aider", "vim")]
    assert [row.split()[0] for row in rows] == ["zed", "vim", "aider"], "what runs comes first"
    assert "decode" in rows[0] and "41" in rows[0] and "25.5" in rows[0] and "12 s" in rows[0]
    assert "512/900" in rows[1] and "waiting" in rows[2]
    assert lines[-1] == "aider: behind 2 running requests"


@pytest.mark.parametrize("width", [20, 40, 60, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    status = changed()
    status["models"][0]["name"] = "org/a-model-with-a-long-name:Q4_K_M" * 2
    status["requests"] = [request("x" * 90, "GET /" + "y" * 90, "prefill", prompt_tokens=123_456)]
    assert all(len(line) <= width for line in rendered(status, width).splitlines())


def test_fits_the_height_and_tells_of_the_rest() -> None:
    status = changed(requests=[request(f"client{n}", "POST /x", "waiting") for n in range(100)])
    text = rendered(status, 80, 24)
    assert len(text.splitlines()) <= 24 and re.search(r"and \d+ more", text)


def test_says_so_where_nothing_is_there() -> None:
    text = rendered(changed(models=[], requests=[]))
    assert "No model is in memory" in text and "No request is under way" in text


def test_an_engine_in_a_long_step_and_a_machine_that_tells_nothing() -> None:
    status = changed(memory={"daemon_bytes": None, "total_bytes": None, "available_bytes": None})
    status["models"][0] |= {"stats": None, "pool": None, "memory_bytes": None}
    text = rendered(status)
    assert "in a long step" in text and "? of ? free" in text


def test_what_clients_say_is_text_and_nothing_else() -> None:
    status = changed(requests=[request("[red]a[/red]", "POST /[bold]", "decode")])
    assert "[red]a[/red]" in rendered(status, 200)


def test_rates_are_between_two_looks_at_one_engine() -> None:
    now = changed()
    now["models"][0]["stats"] |= {"generated_tokens": 1060, "computed_tokens": 9560}
    assert rates_between(STATUS, now, 2.0) == {"tiny": Rates(30.0, 250.0)}
    assert rates_between(now, STATUS, 2.0) == {"tiny": Rates()}, "another engine began to count anew"
    assert rates_between(None, now, 2.0) == {}
    assert rates_between(changed(models=[]), now, 2.0) == {}


@pytest.mark.parametrize(
    ("held", "cached", "width", "picture"),
    [
        ([4, 1, 0, 0], [0, 0, 2, 0], 10, "█▒░·"),
        ([4, 4, 2, 2, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 4, 4], 4, "█▓·░"),
        ([1] * 512, [0] * 512, 80, "▒" * 80),
        ([0], [0], 80, "·"),
    ],
)
def test_map(held: list[int], cached: list[int], width: int, picture: str) -> None:
    pool = {"blocks_per_cell": 4, "held": held, "cached": cached}
    assert pool_map(pool, 4 * len(held), width).plain == picture
    assert as_ascii(picture).isascii()


def test_once_and_piped(fake_daemon: FakeDaemon, quantd: Quantd) -> None:
    for flags in ((), ("--once",)):
        done = quantd("top", "--socket", str(fake_daemon.socket), *flags)
        assert done.returncode == 0 and not done.stderr, done.stderr
        assert "zed" in done.stdout and "\x1b" not in done.stdout
    plain = quantd("top", "--socket", str(fake_daemon.socket), PYTHONIOENCODING="ascii")
    assert plain.returncode == 0 and "###" in plain.stdout
    told = quantd("top", "--socket", str(fake_daemon.socket), "--once", "--json")
    assert json.loads(told.stdout) == STATUS and told.stdout.count("\n") == 1


def test_without_a_daemon(quantd: Quantd, tmp_path: Path) -> None:
    for flags in ((), ("--json", "--once")):
        done = quantd("top", "--socket", str(tmp_path / "no.sock"), *flags)
        assert done.returncode == 1 and "quantd serve" in done.stderr and not done.stdout


def test_json_goes_on_line_by_line(fake_daemon: FakeDaemon, environment: dict[str, str]) -> None:
    command = [Path(sys.executable).with_name("quantd"), "top", "--json", "--interval", "0.1"]
    with subprocess.Popen(
        [*command, "--socket", str(fake_daemon.socket)], stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(3)]
        process.stdout.close()
        assert lines == [STATUS] * 3
        assert process.wait(PATIENCE) == 1, "the reader has gone"


@dataclass
class Terminal:
    """A command in a terminal of 80 by 24."""

    process: subprocess.Popen[bytes]
    fd: int
    attributes: list[Any]
    seen: str = ""

    def until(self, condition: Callable[[str], bool]) -> None:
        """Read until what was shown meets the condition."""
        deadline = time.monotonic() + PATIENCE
        while not condition(self.seen):
            assert time.monotonic() < deadline, self.seen
            self.read()

    def read(self) -> None:
        if select.select([self.fd], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):
                self.seen += os.read(self.fd, 65536).decode(errors="replace")

    def type(self, keys: bytes) -> None:
        os.write(self.fd, keys)

    def end(self) -> int:
        """Its status, once it has ended, with all that it showed read."""
        deadline = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < deadline, self.seen
            self.read()
        self.read()
        return self.process.returncode


@pytest.fixture
def terminal(fake_daemon: FakeDaemon, environment: dict[str, str]) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    attributes = termios.tcgetattr(theirs)

    def own_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [Path(sys.executable).with_name("quantd"), "top", "--interval", "0.1"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment
        | {"QUANTD_SOCKET": str(fake_daemon.socket), "TERM": "xterm-256color", "LC_ALL": "C.UTF-8"},
        preexec_fn=own_terminal,
    )
    opened = Terminal(process, ours, attributes)
    try:
        yield opened
        assert termios.tcgetattr(theirs) == attributes, "keys are read as before"
        assert opened.seen.rindex("\x1b[?1049l") > opened.seen.rindex("\x1b[?1049h"), "the screen is back"
        assert opened.seen.rindex("\x1b[?25h") > opened.seen.rindex("\x1b[?25l"), "the cursor is back"
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)


@pytest.mark.parametrize(("keys", "status"), [(b"q", 0), (b"\x1b[Axx\x1b", 0), (b"\x03", 0)])
def test_a_key_quits(terminal: Terminal, keys: bytes, status: int) -> None:
    terminal.until(lambda seen: "zed" in seen)
    for key in (keys[:3], keys[3:5], keys[5:]) if len(keys) > 1 else (keys,):
        terminal.type(key)
        time.sleep(0.05)
    assert terminal.end() == status


def test_goes_on_over_a_restart_of_the_daemon_and_ends_by_a_signal(
    terminal: Terminal, fake_daemon: FakeDaemon
) -> None:
    terminal.until(lambda seen: "zed" in seen)
    hidden = fake_daemon.socket.with_name("hidden")
    fake_daemon.socket.rename(hidden)
    terminal.until(lambda seen: "No daemon answers" in seen)
    fake_daemon.status = changed(models=[], requests=[])
    hidden.rename(fake_daemon.socket)
    terminal.until(lambda seen: "No model is in memory" in seen)
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM
