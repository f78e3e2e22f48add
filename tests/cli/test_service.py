"""`quantd service`, with a stand-in for systemctl: no test may change what this machine starts."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

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
    """The log of a systemctl and a systemd-sysusers that do nothing."""
    tools, log = tmp_path / "tools", tmp_path / "log"
    tools.mkdir()
    for name in ("systemctl", "systemd-sysusers"):
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
    assert said(calls) == ["--user daemon-reload", "--user enable --now quantd.socket"]
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
    assert [path.name for path in written] == ["quantd.conf", "quantd.service", "quantd.socket"]
    assert "ExecStart=/opt/quantd/bin/quantd serve" in written[1].read_text()
    assert said(calls) == [str(written[0]), "daemon-reload", "enable --now quantd.socket"]


@pytest.mark.parametrize(
    ("executable", "reason"), [("/home/me/bin/quantd", "sees nothing below /home"), ("/opt/a b/q", "plainer")]
)
def test_an_executable_that_the_unit_cannot_reach_is_refused(
    tmp_path: Path, executable: str, reason: str
) -> None:
    with pytest.raises(ServiceError, match=reason):
        Units.of_system(tmp_path).install(Path(executable))
    assert not list(tmp_path.iterdir())


def test_the_manager_s_reason_is_told(
    calls: Path, tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", environment["PATH"])
    with pytest.raises(ServiceError, match="systemctl --user fail: no such thing"):
        Units.of_user(tmp_path).control("fail")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceError, match="does not run systemd"):
        Units.of_user(tmp_path).control("show")
