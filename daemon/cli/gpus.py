"""What `quantd doctor` says of GPUs: a report for people, and a way out of each fault in it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import msgspec

from quantd.daemon.cli.output import format_bytes
from quantd.daemon.config import named_compiler
from quantd.kernels.gpu.report import GpuDevice, GpuReport

_NONE_VISIBLE = ("", "-1", "NoDevFiles")
"""What people set CUDA_VISIBLE_DEVICES to that programs take no GPU."""


def ask_for_gpus() -> GpuReport | str:
    """The report of a process of its own, since that takes torch; or why there is none."""
    probe = subprocess.run(
        [sys.executable, "-P", "-m", "quantd.kernels.gpu.report"],
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        return msgspec.json.decode(probe.stdout, type=GpuReport)
    except msgspec.DecodeError:
        return (probe.stderr.strip() or f"exit status {probe.returncode}").splitlines()[-1]


def gpu_section(report: GpuReport | str, lacking: str | None) -> dict[str, object]:
    """The report as plain data, with its faults under "problems"."""
    if isinstance(report, str):
        return {"problems": [f"the GPUs cannot be looked at: {report}"]}
    section: dict[str, object] = msgspec.to_builtins(report)
    return section | {"problems": list(gpu_problems(report, lacking))}


def gpu_lines(report: GpuReport | str, lacking: str | None) -> Iterator[tuple[str, str]]:
    """(what, what of it) for people."""
    if isinstance(report, str):
        yield "problem", f"the GPUs cannot be looked at: {report}"
        return
    yield "driver", report.driver or "none"
    yield "torch", f"built for CUDA {report.torch_cuda}" if report.torch_cuda else "built for CPUs"
    yield "triton", report.triton or "not installed"
    for i, device in enumerate(report.devices):
        yield f"gpu {i}", _device_line(device)
    if not report.devices:
        yield "devices", "none, hidden by CUDA_VISIBLE_DEVICES" if _is_hidden(report) else "none"
    elif len(report.devices) > 1:
        yield "peers", _peer_line(report)
    for problem in gpu_problems(report, lacking):
        yield "problem", problem


def gpu_problems(report: GpuReport, lacking: str | None) -> Iterator[str]:
    """What keeps GPUs from being used, each with what to do. None where there is no GPU to use.

    lacking: see lacking_for_launches.
    """
    if not report.boards and report.driver is None:
        return
    if report.driver is None:
        yield (
            f"NVIDIA device {', '.join(report.boards)} has no driver: install NVIDIA's driver with the "
            "packages of this Linux and restart"
        )
    if report.torch_cuda is None:
        yield (
            f"torch {report.torch} is built for CPUs: install its build for CUDA "
            "(torch's install page has the command for each CUDA version)"
        )
    elif _is_hidden(report):
        if report.visible not in _NONE_VISIBLE:
            yield f"CUDA_VISIBLE_DEVICES is {report.visible!r}, which leaves no GPU: unset it"
    elif report.driver is not None and report.cuda_error:
        yield (
            f"CUDA does not start ({report.cuda_error}): update the driver to one for CUDA "
            f"{report.torch_cuda}, or restart if it was updated just now"
        )
    if report.triton is None:
        yield "triton cannot be imported: pip install triton, or pip install -e '.[gpu]' in quantd's folder"
    elif lacking is not None:
        yield lacking
    yield from (_too_old(i, device) for i, device in enumerate(report.devices) if _is_too_old(report, device))


def lacking_for_launches() -> str | None:
    """What triton lacks to compile what launches a kernel, with the remedy; None: nothing."""
    if not (named_compiler() or shutil.which("gcc") or shutil.which("clang")):
        return "triton needs a C compiler to launch kernels: install gcc, or name one in CC"
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if header.exists():
        return None
    return f"triton needs {header} to launch kernels: install python3-dev or python3-devel"


def _is_hidden(report: GpuReport) -> bool:
    return report.driver is not None and bool(report.cuda_error) and report.visible is not None


def _is_too_old(report: GpuReport, device: GpuDevice) -> bool:
    return report.triton is not None and not device.kernels


def _too_old(index: int, device: GpuDevice) -> str:
    return (
        f"gpu {index} ({device.name}) is sm_{device.capability}, older than the kernels: "
        "hide it with CUDA_VISIBLE_DEVICES and use the others, or --backend cpu"
    )


def _device_line(device: GpuDevice) -> str:
    memory = f"{format_bytes(device.memory_free)} of {format_bytes(device.memory_total)} free"
    return f"{device.name}, sm_{device.capability}, {memory}; {device.kernels or 'no kernels'}"


def _peer_line(report: GpuReport) -> str:
    pairs = " ".join(f"{i}-{j}" for i, j in report.peers if i < j and (j, i) in report.peers)
    return pairs or "none, ranks exchange through the host's memory"
