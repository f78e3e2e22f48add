"""A daemon that a command starts for itself: the real one, without a model."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import PATIENCE, until


def left_behind(environment: dict[str, str]) -> list[psutil.Process]:
    """Processes that belong to this test's own home folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("QUANTD_HOME") == environment["QUANTD_HOME"]:
                found.append(process)
        except psutil.Error:  # not ours to look into, or gone
            continue
    return found


def test_a_command_without_a_daemon_starts_one_and_ends_it(quantd, environment: dict[str, str]) -> None:
    done = quantd("run", "gone", "Hi")
    assert (done.returncode, done.stdout) == (1, "")
    assert "there is no model 'gone'" in done.stderr
    assert left_behind(environment) == []
    log = (Path(environment["QUANTD_HOME"]) / "state" / "daemon.log").read_text()
    socket = log.partition("READY unix:")[2].split()[0]
    assert socket and not Path(socket).parent.exists()


def test_a_daemon_that_cannot_start_gives_its_reason(quantd, environment: dict[str, str]) -> None:
    home = Path(environment["QUANTD_HOME"])
    home.mkdir()
    (home / "quantd.toml").write_text("prot = 1")
    done = quantd("run", "gone", "Hi")
    assert done.returncode == 1
    assert "The daemon did not start: Error: " in done.stderr
    assert "quantd.toml: prot: no such key; did you mean port?" in done.stderr
    assert left_behind(environment) == []


def test_an_address_that_was_asked_for_is_never_replaced(quantd, environment: dict[str, str]) -> None:
    assert (
        "No daemon answers at unix:/nowhere/api.sock"
        in quantd("run", "x", "Hi", "--socket", "/nowhere/api.sock").stderr
    )
    assert not Path(environment["QUANTD_HOME"]).exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_however_the_command_ends_its_daemon_ends_too(
    environment: dict[str, str], short_folder: str, number: signal.Signals
) -> None:
    code = (
        "import pathlib, sys, time\n"
        "from quantd.daemon.cli.spawn import own_daemon\n"
        "with own_daemon(pathlib.Path(sys.argv[1])) as client:\n"
        "    print(client.get('/quantd/status')['pid'], flush=True)\n"
        "    time.sleep(600)\n"
    )
    log = Path(environment["QUANTD_HOME"]) / "state" / "daemon.log"
    # What SIGKILL leaves is an empty folder for the socket, here inside one that goes with the test.
    environment["TMPDIR"] = short_folder
    with subprocess.Popen(
        [sys.executable, "-c", code, log], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    ) as command:
        assert command.stdout is not None
        daemon = int(command.stdout.readline())
        assert {process.pid for process in left_behind(environment)} == {command.pid, daemon}
        command.send_signal(number)
        command.wait(PATIENCE)
    until(lambda: left_behind(environment) == [], "the daemon ends")
