"""`quantd service`, with a stand-in for systemctl: no test may change what this machine starts."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from quantd.daemon.cli.sleeping import running_daemons, tell
from quantd.daemon.errors import ServiceError
from quantd.daemon.units import Units

SYSTEMCTL = """#!/bin/sh
echo "$0 $*" >> "{log}"
[ "$*" = "--user fail" ] && {{ echo "no such thing" >&2; exit 1; }}
[ "$2" = show ] && printf "ActiveState=active\\nSubState=listening\\nStatusText=2 running = busy\\n"
exit 0
"""


@pytest.fixture
def calls(tmp_path: Path, environment: dict[str, str]) -> Path:
    """The log of a systemctl and its like that do nothing."""
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    for name in ("systemctl", "systemd-sysusers", "systemd-tmpfiles"):
        (tools / name).write_text(SYSTEMCTL.format(log=log))
        (tools / name).chmod(0o755)
    environment["PATH"] = f"{tools}{os.pathsep}{environment['PATH']}"
    environment["XDG_CONFIG_HOME"] = str(tmp_path / "config")
    return log


def said(log: Path) -> list[str]:
    return [line.partition(" ")[2] for line in log.read_text().splitlines()]


def test_a_user_s_service_comes_tells_of_itself_and_goes(quantd, calls: Path, tmp_path: Path) -> None:
    folder = tmp_path / "config" / "systemd" / "user"
    done = quantd("service", "install", "--user")
    assert done.returncode == 0, done.stderr
    unit = (folder / "quantd.service").read_text()
    assert f"\nExecStart={Path(sys.executable).with_name('quantd')} serve --idle-exit 1h\n" in unit
    assert "ListenStream=%t/quantd/api.sock" in (folder / "quantd.socket").read_text()
    assert said(calls) == [
        "--user show --property=Version",
        "--user daemon-reload",
        "--user enable --now quantd.socket",
    ]
    status = json.loads(quantd("service", "status", "--user", "--json").stdout)
    assert status["quantd.service"]["StatusText"] == "2 running = busy"
    text = quantd("service", "status", "--user").stdout
    assert text.splitlines()[1] == "quantd.socket: active, listening, 2 running = busy"
    assert quantd("service", "uninstall", "--user").returncode == 0
    assert list(folder.iterdir()) == []
    assert said(calls)[-2:] == ["--user disable --now quantd.service quantd.socket", "--user daemon-reload"]
    again = quantd("service", "uninstall", "--user")
    assert again.stderr == f"Error: no units of quantd are in {folder}\n"


def test_the_machine_s_service_brings_its_group(
    calls: Path, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", environment["PATH"])
    units = Units.of_system(tmp_path / "root")
    written = units.install(Path("/opt/quantd/bin/quantd"))
    assert [path.relative_to(tmp_path / "root").as_posix() for path in written] == [
        "etc/sysusers.d/quantd.conf",
        "etc/tmpfiles.d/quantd.conf",
        "etc/systemd/system/quantd.service",
        "etc/systemd/system/quantd.socket",
        "etc/systemd/system/quantd-sleep.service",
    ]
    assert "ExecStart=/opt/quantd/bin/quantd serve" in written[2].read_text()
    assert "ExecStop=/opt/quantd/bin/quantd service wake" in written[4].read_text()
    assert said(calls) == [
        "show --property=Version",
        str(written[0]),
        f"--create {written[1]}",
        "daemon-reload",
        "enable --now quantd.socket",
        "enable quantd-sleep.service",
    ]
    assert sorted(units.uninstall()) == sorted(written)
    assert not any(path.exists() for path in written)


@pytest.mark.parametrize(
    ("executable", "reason"), [("/home/me/bin/quantd", "sees nothing below /home"), ("/opt/a b/q", "plainer")]
)
def test_an_executable_that_the_unit_cannot_reach_is_refused(
    tmp_path: Path, executable: str, reason: str
) -> None:
    with pytest.raises(ServiceError, match=reason):
        Units.of_system(tmp_path).install(Path(executable))
    assert not list(tmp_path.iterdir())


def test_where_no_manager_answers_nothing_is_written(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    (tmp_path / "tools" / "systemctl").write_text("#!/bin/sh\necho Host is down >&2; exit 1\n")
    monkeypatch.setenv("PATH", environment["PATH"])
    for units in (Units.of_user(tmp_path / "root"), Units.of_system(tmp_path / "root")):
        with pytest.raises(ServiceError, match="Host is down"):
            units.install(Path("/opt/quantd/bin/quantd"))
    assert not (tmp_path / "root").exists() and not calls.exists()


def test_the_manager_s_reason_is_told(
    calls: Path, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", environment["PATH"])
    with pytest.raises(ServiceError, match="systemctl --user fail: no such thing"):
        Units.of_user(tmp_path).control("fail")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceError, match="does not run systemd"):
        Units.of_user(tmp_path).control("show")


ANSWER = b'HTTP/1.1 200 OK\r\nContent-Length: 21\r\n\r\n{"unloaded": ["big"]}'


def answering(path: Path, requests: list[bytes]) -> contextlib.closing[socket.socket]:
    """A daemon that unloads `big`, once."""
    path.parent.mkdir(parents=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def answer() -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # nobody came before the listener was closed
            return
        with connection:
            data = b""
            while not data.endswith(b"{}"):
                data += connection.recv(4096)
            requests.append(data.partition(b"\r\n")[0])
            connection.sendall(ANSWER)

    threading.Thread(target=answer, daemon=True).start()
    return contextlib.closing(listener)


def test_before_the_machine_sleeps_all_daemons_are_told_and_none_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """systemctl says of user 1001 that it listens itself; of the others nothing it could know."""
    told: list[str] = []
    requests: list[bytes] = []
    with tempfile.TemporaryDirectory(prefix="qd-") as name, contextlib.ExitStack() as opened:
        folder = Path(name).resolve()
        paths = [folder / f"{uid}/quantd/api.sock" for uid in (1000, 1001)]
        for path in paths:
            opened.enter_context(answering(path, requests))
        linked = folder / "1002" / "quantd"
        linked.mkdir(parents=True)
        (linked / "api.sock").symlink_to(paths[0])
        (folder / "systemctl").write_text(
            f'#!/bin/sh\n[ "$XDG_RUNTIME_DIR" = "{folder}/1001" ] && printf "active\\ninactive\\n"\nexit 3\n'
        )
        (folder / "systemctl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        tell(running_daemons(folder / "api.sock", folder), "/quantd/sleep", told.append)
        assert told == [f"unix:{paths[0]}: unloaded big"]
    assert requests == [b"POST /quantd/sleep HTTP/1.1"]
