"""The chat of `quantd run`, on a real pseudo-terminal."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon
from waiting import PATIENCE


class Terminal:
    """The far end of a pseudo-terminal."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process, self._master, self._seen = process, master, ""

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def expect(self, text: str) -> str:
        """What was shown up to the next `text`; fails if that does not come."""
        assert self._shows(text, PATIENCE), f"no {text!r} in {self._seen!r}"
        before, _, self._seen = self._seen.partition(text)
        return before

    def interrupt_line(self) -> None:
        """Press Ctrl-C until a new prompt comes: input() misses a signal just before it waits."""
        for _ in range(20):
            self.type("\x03")
            if self._shows(">>> ", 1):
                self.expect(">>> ")
                return
        raise AssertionError("Ctrl-C does not end the line")

    def _shows(self, text: str, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while text not in self._seen:
            if not select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))[0]:
                return False
            self._seen += os.read(self._master, 4096).decode()
        return True


@contextmanager
def chat(socket: Path, environment: dict[str, str]) -> Iterator[Terminal]:
    master, slave = pty.openpty()
    command = [Path(sys.executable).with_name("quantd"), "run", "tiny", "--socket", socket]
    # A session of its own with the terminal as its controlling one, so that typed Ctrl-C is a signal.
    process = subprocess.Popen(
        [sys.executable, "-c", _TAKE_TERMINAL, *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment | {"TERM": "dumb"},
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        process.kill()
        process.wait()
        os.close(master)


_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios\n"
    "fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    "os.execv(sys.argv[1], sys.argv[1:])\n"
)


@pytest.fixture
def terminal(fake_daemon: FakeDaemon, environment: dict[str, str]) -> Iterator[Terminal]:
    with chat(fake_daemon.socket, environment) as terminal:
        terminal.expect(">>> ")
        yield terminal


def test_a_session(terminal: Terminal, fake_daemon: FakeDaemon, environment: dict[str, str]) -> None:
    terminal.type("Hi\n")
    terminal.expect("Hello there")
    terminal.expect(">>> ")

    assert "temperature" not in fake_daemon.bodies[0]

    terminal.type('"""first\n')
    terminal.expect("... ")
    terminal.type('/second"""\n')
    terminal.expect("Hello there")
    terminal.expect(">>> ")
    assert [message["content"] for message in fake_daemon.bodies[-1]["messages"]] == [
        "Hi",
        "Hello there",
        "first\n/second",
    ]

    for line in ("/set temperature 0.5", "/set seed 7", "/set seed", "/set system Be brief", "/clear"):
        terminal.type(line + "\n")
        terminal.expect(">>> ")
    terminal.type("Again\n")
    terminal.expect("Hello there")
    terminal.expect(">>> ")
    body = fake_daemon.bodies[-1]
    assert [message["content"] for message in body["messages"]] == ["Be brief", "Again"]
    assert body["temperature"] == 0.5
    assert "seed" not in body

    terminal.type("/set\n")
    terminal.expect("system Be brief")
    terminal.expect("temperature 0.5")
    terminal.type("/set top_p much\n")
    terminal.expect("top_p takes a number")
    terminal.type("/bogus\n")
    terminal.expect("No command /bogus")
    terminal.type("/bye\n")
    assert terminal.process.wait(PATIENCE) == 0
    history = (Path(environment["QUANTD_HOME"]) / "state" / "chat_history").read_text()
    assert "Hi\n" in history and "/bye\n" in history


def test_ctrl_c_stops_the_answer_and_keeps_the_session(terminal: Terminal, fake_daemon: FakeDaemon) -> None:
    fake_daemon.endless = True
    terminal.type("Hi\n")
    terminal.expect("there..")
    terminal.type("\x03")
    terminal.expect(">>> ")
    assert fake_daemon.left.wait(PATIENCE)

    fake_daemon.endless = False
    terminal.type("More\n")
    terminal.expect("Hello there")
    terminal.expect(">>> ")
    roles = [message["role"] for message in fake_daemon.bodies[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]

    terminal.type("half a line")
    terminal.expect("half a line")
    terminal.interrupt_line()
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE) == 0
    assert len(fake_daemon.bodies) == 2


def test_a_refused_question_is_told_and_forgotten(terminal: Terminal, fake_daemon: FakeDaemon) -> None:
    fake_daemon.chat_error = {"message": "The prompt has 9000 tokens, the limit is 2048"}
    terminal.type("long\n")
    terminal.expect("Error: The prompt has 9000 tokens, the limit is 2048")
    terminal.expect(">>> ")
    fake_daemon.chat_error = None
    terminal.type("short\n")
    terminal.expect("Hello there")
    assert [message["content"] for message in fake_daemon.bodies[-1]["messages"]] == ["short"]
