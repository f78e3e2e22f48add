"""systemd's units of the daemon: there, enabled, failed, and what they said last."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from quantd.daemon.config import config_home
from quantd.daemon.doctor.finding import Finding
from quantd.daemon.errors import ServiceError
from quantd.daemon.units import NAMES, Units, properties

_SHOWN = "LoadState,ActiveState,SubState,UnitFileState,Result,ExecMainStatus,ExecStart,StatusText"
_EXECUTABLE = re.compile(r"path=(\S+)")


def look_at_units() -> Iterator[Finding]:
    """Those of the user's manager and of the machine's."""
    for units in (Units.of_user(config_home()), Units.of_system()):
        for name in NAMES:
            yield _unit(units, name)


def _unit(units: Units, name: str) -> Finding:
    whose = "user" if units.user else "system"
    shown = f"{whose} {name}"
    try:
        values = properties(units.control("show", name, f"--property={_SHOWN}"))
    except ServiceError as error:
        there = (units.folder / name).exists()
        value = "not installed" if not there else f"written, but systemd does not answer ({error})"
        return Finding("units", shown, value)
    if values.get("LoadState") != "loaded":
        return Finding("units", shown, "not installed")
    return _loaded(units, name, shown, values)


def _loaded(units: Units, name: str, shown: str, values: Mapping[str, str]) -> Finding:
    state = ", ".join(
        values[key] for key in ("ActiveState", "SubState", "UnitFileState", "StatusText") if values.get(key)
    )
    systemctl = "systemctl --user" if units.user else "sudo systemctl"
    install = "quantd service install" if units.user else "sudo quantd service install"
    if values["ActiveState"] == "failed":
        last = _last_line(units, name) or f"{values.get('Result')}, status {values.get('ExecMainStatus')}"
        restart = f"{systemctl} reset-failed {name} && {systemctl} start {name}"
        return Finding("units", shown, state, fault=f"it has failed: {last}", fix=f"quantd logs; {restart}")
    found = _EXECUTABLE.search(values.get("ExecStart", ""))
    if found and shutil.which(found[1]) is None:
        return Finding("units", shown, state, fault=f"it starts {found[1]}, which is not there", fix=install)
    if name.endswith(".socket") and values["ActiveState"] != "active":
        fix = f"{systemctl} enable --now {name}"
        return Finding("units", shown, state, fault="systemd does not listen for quantd", fix=fix)
    if name.endswith(".socket") and values.get("UnitFileState") != "enabled":
        note, fix = "it does not start with the session", f"{systemctl} enable {name}"
        return Finding("units", shown, state, note=note, fix=fix)
    return Finding("units", shown, state)


def _last_line(units: Units, name: str) -> str | None:
    """What the journal has of it, if we may read that."""
    if shutil.which("journalctl") is None:
        return None
    whose = "--user-unit" if units.user else "--unit"
    command = ["journalctl", whose, name, "--lines=1", "--output=cat", "--quiet"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    return lines[-1].strip() if lines else None
