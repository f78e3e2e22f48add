"""`quantd doctor`: what this machine offers, what is in the way, and the way out."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import click

from quantd.daemon.cli.client import DaemonClient
from quantd.daemon.cli.gpus import ask_for_gpus, gpu_lines, gpu_section, lacking_for_launches
from quantd.daemon.cli.options import json_option
from quantd.daemon.cli.output import print_json, spinner
from quantd.daemon.config import Paths, client_sockets
from quantd.daemon.doctor.finding import Finding
from quantd.daemon.doctor.listening import look_at_group, look_at_port, look_at_socket
from quantd.daemon.doctor.machine import look_at_memory, look_at_processor
from quantd.daemon.doctor.services import look_at_units
from quantd.daemon.errors import DaemonError, NoDaemonError
from quantd.kernels.gpu.report import GpuReport


@click.command("doctor")
@click.option("--models", is_flag=True, help="Read all models too, to tell whether they are whole.")
@json_option
def doctor_command(models: bool, as_json: bool) -> int:
    """Check versions, folders, processor, memory, GPUs, kernels, sockets, ports, units and models.

    Each fault comes with the command that mends it; the exit status is 1 where there is one.
    """
    with spinner("looking at this machine ..."), ThreadPoolExecutor() as pool:
        asked = pool.submit(ask_for_gpus)  # for seconds, in which the rest is looked at
        findings = list(_look(models))
        gpus, lacking = asked.result(), lacking_for_launches()
    faults = [finding for finding in findings if finding.fault is not None]
    faults += _gpu_faults(gpus, lacking)
    if as_json:
        print_json(_report(findings, faults) | {"gpus": gpu_section(gpus, lacking)})
    else:
        _print(findings, list(gpu_lines(gpus, lacking)))
        click.echo(f"{len(faults)} {'fault' if len(faults) == 1 else 'faults'}." if faults else "No fault.")
    return 1 if faults else 0


def _look(models: bool) -> Iterator[Finding]:
    """All but the GPUs."""
    from quantd.daemon.doctor.storage import look_at_folders, look_at_models  # jinja2 among others

    paths, sockets = Paths.from_env(), client_sockets(None)
    yield from _versions()
    yield from look_at_folders(paths)
    yield from look_at_processor(paths.kernels)
    yield from look_at_memory()
    for path in sockets:
        yield look_at_socket(path)
    yield from look_at_group()
    yield look_at_port(frozenset(_daemons()))
    yield from look_at_units()
    yield from look_at_models(paths.models, thoroughly=models)


def _versions() -> Iterator[Finding]:
    yield Finding("versions", "python", platform.python_version())
    for name in ("quantd", "torch"):
        try:
            yield Finding("versions", name, metadata.version(name))
        except metadata.PackageNotFoundError:
            fix = "pip install torch" if name == "torch" else "pip install -e . in quantd's folder"
            fault = f"{name} is not installed"
            yield Finding("versions", name, "not installed", fault=fault, fix=fix)


def _daemons() -> Iterator[int]:
    """The process ids of those that answer."""
    for path in client_sockets(None):
        try:
            yield DaemonClient(path).get("/quantd/status")["pid"]
        except (DaemonError, NoDaemonError):
            continue


def _gpu_faults(report: GpuReport | str, lacking: str | None) -> list[Finding]:
    problems = gpu_section(report, lacking)["problems"]
    assert isinstance(problems, list)
    return [Finding("gpus", "problem", problem, fault=problem) for problem in problems]


def _report(findings: Sequence[Finding], faults: Sequence[Finding]) -> dict[str, object]:
    """Plain data: what is, by section; then what is wrong, and what could be better."""
    sections: dict[str, object] = {}
    for finding in findings:
        section = sections.setdefault(finding.section, {})
        assert isinstance(section, dict)
        section[finding.name] = finding.value
    notes = [finding for finding in findings if finding.note is not None]
    return sections | {
        "faults": [_remark(finding, finding.fault) for finding in faults],
        "notes": [_remark(finding, finding.note) for finding in notes],
    }


def _remark(finding: Finding, text: str | None) -> dict[str, str | None]:
    return {"section": finding.section, "name": finding.name, "what": text, "fix": finding.fix}


def _print(findings: Sequence[Finding], gpus: Sequence[tuple[str, str]]) -> None:
    for section in dict.fromkeys(finding.section for finding in findings):
        click.echo(f"{section}:")
        for finding in findings:
            if finding.section == section:
                _print_finding(finding)
    click.echo("gpus:")
    for key, value in gpus:
        click.echo(f"  {key:<10} {value}")


def _print_finding(finding: Finding) -> None:
    click.echo(f"  {finding.name:<10} {finding.value}")
    for word, text in (("fault", finding.fault), ("note", finding.note), ("fix", finding.fix)):
        if text is not None:
            style = {"fault": "red", "note": "yellow"}.get(word)
            click.echo(f"    {click.style(f'{word}: {text}', fg=style)}")
