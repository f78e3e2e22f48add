"""`quantd doctor`: what this machine offers, and what is in the way."""

from __future__ import annotations

import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import click

from quantd.daemon.cli.client import DaemonClient
from quantd.daemon.cli.gpus import ask_for_gpus, gpu_lines, gpu_section, has_c_compiler
from quantd.daemon.cli.options import json_option
from quantd.daemon.cli.output import print_json, spinner
from quantd.daemon.config import Paths, client_sockets
from quantd.daemon.errors import DaemonError, NoDaemonError

_CPU_FEATURES = ("avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "i8mm")
_PROBE = (
    "import pathlib, sys; from quantd.kernels.select import select_ops; "
    "print(select_ops(cache=pathlib.Path(sys.argv[1])).name)"
)


@click.command("doctor")
@json_option
def doctor_command(as_json: bool) -> None:
    """Check versions, folders, processor, GPUs, kernels and sockets."""
    with spinner("looking at this machine ..."), ThreadPoolExecutor() as pool:
        asked = pool.submit(ask_for_gpus)  # for seconds, in which the rest is looked at
        report = _report()
        gpus, has_compiler = asked.result(), has_c_compiler()
    if as_json:
        print_json(report | {"gpus": gpu_section(gpus, has_compiler)})
        return
    sections = {name: list(entries.items()) for name, entries in report.items()}
    for section, lines in (sections | {"gpus": list(gpu_lines(gpus, has_compiler))}).items():
        click.echo(f"{section}:")
        for key, value in lines:
            click.echo(f"  {key:<10} {value}")


def _report() -> dict[str, dict[str, str]]:
    """All but the GPUs."""
    return {
        "versions": {"python": platform.python_version()}
        | {name: _version(name) for name in ("quantd", "torch")},
        "paths": _paths(Paths.from_env()),
        "processor": _processor(Paths.from_env().kernels),
        "sockets": {str(path): _socket_state(path) for path in client_sockets(None)},
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _paths(paths: Paths) -> dict[str, str]:
    folders = {"models": paths.models, "cache": paths.cache, "state": paths.state, "config": paths.config}
    return {name: f"{path}{'' if path.exists() else ' (not there yet)'}" for name, path in folders.items()}


def _processor(kernel_cache: Path) -> dict[str, str]:
    features = _cpu_features()
    return {
        "machine": platform.machine(),
        "features": " ".join(name for name in _CPU_FEATURES if name in features)
        or "none of those looked for",
        "kernels": _kernels(kernel_cache),
    }


def _kernels(cache: Path) -> str:
    """The backend that an engine would take, asked of a process of its own, since it needs torch."""
    probe = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE, str(cache)], capture_output=True, text=True, check=False
    )
    return "; ".join(line for line in (probe.stdout + probe.stderr).splitlines()[-3:] if line.strip())


def _cpu_features() -> set[str]:
    """The flags that Linux lists; elsewhere none are known."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return {
        flag
        for line in lines
        if line.startswith(("flags", "Features"))
        for flag in line.split(":", 1)[1].split()
    }


def _socket_state(path: Path) -> str:
    try:
        status = DaemonClient(path).get("/quantd/status")
    except NoDaemonError:
        return "a dead daemon's; the next one replaces it" if path.is_socket() else "no daemon"
    except DaemonError as error:
        return str(error)
    return f"quantd {status['version']} answers, process {status['pid']}"
