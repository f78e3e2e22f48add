"""`quantd logs`: whose messages, from where, and that following outlasts what happens to files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from fake_daemon import STATUS, FakeDaemon, Quantd
from waiting import PATIENCE

from quantd.daemon.cli.tail import follow, last_lines

ENTRY = {
    "time": "2026-11-30T14:05:11.123+00:00",
    "program": "zed",
    "route": "POST /v1/chat/completions",
    "model": "tiny",
    "status": 200,
    "end": "stop",
    "error": None,
    "choices": 1,
    "prompt_tokens": 412,
    "cached_tokens": 380,
    "output_tokens": 96,
    "first_token_seconds": 0.21,
    "total_seconds": 1.92,
}


@pytest.fixture
def journalctl(tmp_path: Path) -> str:
    """A folder for PATH whose journalctl tells what it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "journalctl"
    script.write_text('#!/bin/sh\necho "journal: $*"\n')
    script.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def with_log(daemon: FakeDaemon, **fields: Any) -> tuple[str, str]:
    daemon.status = STATUS | {"request_log": None} | fields
    return "--socket", str(daemon.socket)


def test_a_daemon_under_systemd_has_its_messages_in_the_journal(
    fake_daemon: FakeDaemon, quantd: Quantd, journalctl: str
) -> None:
    for log, flags, asked in (
        ({"unit": "quantd.service", "user": True}, (), "--user-unit quantd.service --lines 50"),
        ({"unit": "my.service"}, ("-f", "-n", "3"), "--unit my.service --lines 3 --follow"),
    ):
        at = with_log(fake_daemon, log={"kind": "journal"} | log)
        done = quantd("logs", *at, *flags, PATH=journalctl)
        assert (done.returncode, done.stdout) == (0, f"journal: {asked}\n")


def test_a_spawned_daemon_has_them_in_a_file(fake_daemon: FakeDaemon, quantd: Quantd, tmp_path: Path) -> None:
    file = tmp_path / "d.log"
    file.write_text("".join(f"line {n}\n" for n in range(100)) + "a half")
    at = with_log(fake_daemon, log={"kind": "file", "path": str(file)})
    assert quantd("logs", *at, "-n", "2").stdout == "line 98\nline 99\n"
    assert len(quantd("logs", *at).stdout.splitlines()) == 50


def test_messages_that_nobody_keeps(fake_daemon: FakeDaemon, quantd: Quantd) -> None:
    at = with_log(fake_daemon, log={"kind": "terminal", "path": "/dev/pts/3"})
    done = quantd("logs", *at)
    assert done.returncode == 1 and "/dev/pts/3" in done.stderr and "service install" in done.stderr
    done = quantd("logs", "--requests", *at)
    assert done.returncode == 1 and "--request-log" in done.stderr


def test_without_a_daemon(quantd: Quantd, environment: dict[str, str], journalctl: str) -> None:
    done = quantd("logs")
    assert done.returncode == 1 and "No daemon runs" in done.stderr
    log = Path(environment["QUANTD_HOME"]) / "state" / "daemon.log"
    log.parent.mkdir(parents=True)
    log.write_text("it died\n")
    assert quantd("logs").stdout == "it died\n"
    config = Path(environment["QUANTD_HOME"]) / "config"
    unit = config / "systemd" / "user" / "quantd.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("")
    asked = quantd("logs", PATH=journalctl, XDG_CONFIG_HOME=str(config)).stdout
    assert asked == "journal: --user-unit quantd.service --lines 50\n"
    bare = str(Path(sys.executable).parent)
    done = quantd("logs", PATH=bare, XDG_CONFIG_HOME=str(config))
    assert done.returncode == 1 and "journalctl is not here" in done.stderr


def test_requests_for_people_and_for_programs(quantd: Quantd, environment: dict[str, str]) -> None:
    assert "not there yet" in quantd("logs", "--requests").stderr
    file = Path(environment["QUANTD_HOME"]) / "state" / "requests.jsonl"
    file.parent.mkdir(parents=True)
    refused = ENTRY | {"status": 404, "end": "error", "error": "no model", "choices": 0, "model": None}
    refused |= {"first_token_seconds": None, "prompt_tokens": 0}
    lines = [json.dumps(entry) for entry in (ENTRY, refused)] + ["{ broken"]
    file.write_text("".join(f"{line}\n" for line in lines))
    told = quantd("logs", "--requests", TZ="UTC").stdout.splitlines()
    assert told[0] == (
        "2026-11-30 14:05:11  zed  POST /v1/chat/completions  tiny  200  stop"
        "  412 (380 cached) + 96 tokens  1.92 s  (first token 0.21 s)"
    )
    assert told[1].endswith("-  404  error  1.92 s  no model") and told[2] == "{ broken"
    assert quantd("logs", "--requests", "--json").stdout.splitlines() == lines


@pytest.mark.parametrize("size", [0, 1, 7, 70_000])
def test_the_last_lines_of_files_of_any_size(tmp_path: Path, size: int) -> None:
    path = tmp_path / "log"
    path.write_text(f"{'é' * size}\n" * 3 + "not whole")
    for count in range(5):
        assert last_lines(path, count) == ["é" * size] * min(count, 3)


def test_lines_of_the_file_before_come_first(tmp_path: Path) -> None:
    (tmp_path / "log.1").write_text("1\n2\n3\n")
    (tmp_path / "log").write_text("4\n5\n")
    assert last_lines(tmp_path / "log", 4) == ["2", "3", "4", "5"]


@contextlib.contextmanager
def following(path: Path, count: int) -> Iterator[Callable[[], str]]:
    """A function that waits for the next line."""
    lines: Queue[str] = Queue()

    def read() -> None:
        for line in follow(path, count):
            if line == "END":
                return
            lines.put(line)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield lambda: lines.get(timeout=PATIENCE)
    finally:
        with path.open("a") as file:
            file.write("\nEND\n")
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_following_outlasts_rotation_and_being_cut(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with following(path, 5) as line:
        path.write_text("1\n")
        assert line() == "1"
        with path.open("a") as file:
            file.write("2\n3")
            file.flush()
            assert line() == "2"
            path.rename(tmp_path / "log.1")
            file.write("\n4\n")
        path.write_text("5\n")
        assert [line() for _ in range(3)] == ["3", "4", "5"]
        path.write_text("")
        time.sleep(0.6)
        with path.open("a") as file:
            file.write("6\n")
        assert line() == "6"
        path.unlink()
        path.write_text("7\n")
        assert line() == "7"


def test_ctrl_c_ends_following(fake_daemon: FakeDaemon, environment: dict[str, str], tmp_path: Path) -> None:
    file = tmp_path / "d.log"
    file.write_text("hello\n")
    at = with_log(fake_daemon, log={"kind": "file", "path": str(file)})
    command = [Path(sys.executable).with_name("quantd"), "logs", "-f", *at]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline() == b"hello\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
