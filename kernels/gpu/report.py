"""What a GPU backend would find on this machine. `python -m quantd.kernels.gpu.report` prints it as JSON.

For a process of its own: it imports torch and wakes every GPU. The records are free of torch.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module, metadata
from itertools import permutations
from pathlib import Path

import msgspec

from quantd.kernels.gpu.targets import FIRST_DOT, TARGETS

_DISPLAY_CLASS = "0x03"
_NVIDIA = "0x10de"


class GpuDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A GPU. capability: 89 for sm_89. Memory in bytes. kernels: what runs on it, "" for nothing."""

    name: str
    capability: int
    memory_total: int
    memory_free: int
    kernels: str


class GpuReport(msgspec.Struct, frozen=True, kw_only=True):
    """driver: version of NVIDIA's, None without one. boards: PCI addresses of NVIDIA's display devices.

    torch_cuda: the CUDA version that torch is built for, None in a build for CPUs. triton: its version,
    None where it cannot be imported. cuda_error: why torch finds no GPU, "" if it does or is not built to.
    visible: what CUDA_VISIBLE_DEVICES says, None where nothing does.
    peers: pairs (i, j) of devices of which i reads j's memory without going through the host's.
    """

    driver: str | None
    boards: list[str]
    torch: str
    torch_cuda: str | None
    triton: str | None
    devices: list[GpuDevice]
    peers: list[tuple[int, int]]
    cuda_error: str = ""
    visible: str | None = None


def collect(sys_folder: Path = Path("/sys")) -> GpuReport:
    """Look at everything."""
    import torch

    triton, error = _triton_version(), _cuda_error()
    count = torch.cuda.device_count() if torch.version.cuda and not error else 0
    return GpuReport(
        driver=_driver(sys_folder),
        boards=_boards(sys_folder),
        torch=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        triton=triton,
        devices=[_device(i, has_triton=triton is not None) for i in range(count)],
        peers=[pair for pair in permutations(range(count), 2) if torch.cuda.can_device_access_peer(*pair)],
        cuda_error=error,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
    )


def kernels_for(capability: int) -> str:
    """The kernels of quantd that a GPU of this capability runs, for people; "" for none."""
    if capability < TARGETS[0]:
        return ""
    if capability < FIRST_DOT:
        return (
            "Triton without tensor cores: few rows from packed weights, more dequantized for the vendor's "
            "matrix product; --same-bits does without that, and prompts take some times as long"
        )
    return "Triton on tensor cores"


def _device(index: int, has_triton: bool) -> GpuDevice:
    import torch

    properties = torch.cuda.get_device_properties(index)
    capability = 10 * properties.major + properties.minor
    free, total = torch.cuda.mem_get_info(index)
    return GpuDevice(
        name=properties.name,
        capability=capability,
        memory_total=total,
        memory_free=free,
        kernels=kernels_for(capability) if has_triton else "",
    )


def _cuda_error() -> str:
    """The reason, in CUDA's words, for which a build for CUDA has no GPU here."""
    import torch

    if torch.version.cuda is None:
        return ""
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return str(error).partition("\n")[0]
    return ""


def _triton_version() -> str | None:
    try:
        import quantd.kernels.gpu.linear  # noqa: F401  (imports triton, which may be there and broken)

        return metadata.version("triton")
    except (ImportError, metadata.PackageNotFoundError):
        return None


def _driver(sys_folder: Path) -> str | None:
    """By the kernel module where there is one, else (as under WSL) by NVML."""
    module = sys_folder / "module/nvidia/version"
    if module.exists():
        return module.read_text().strip()
    try:
        nvml = import_module("pynvml")  # of nvidia-ml-py, which few have
        nvml.nvmlInit()
        return str(nvml.nvmlSystemGetDriverVersion())
    except Exception:  # not there, or there without a driver: its own errors derive from Exception alone
        return None


def _boards(sys_folder: Path) -> list[str]:
    """Display devices of NVIDIA's on the PCI bus, whether any driver knows them or not."""
    return [
        device.name
        for device in sorted((sys_folder / "bus/pci/devices").glob("*"))
        if _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_DISPLAY_CLASS)
    ]


def _text(file: Path) -> str:
    return file.read_text().strip() if file.exists() else ""


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(collect()))
