"""What this machine's processor is (Linux, torch-free)."""

from __future__ import annotations

import os
from pathlib import Path

_SYS = Path("/sys")


def physical_cores(sys: Path = _SYS) -> int:
    """Physical cores that this process may run on; hyperthreads share one."""
    cpus = os.sched_getaffinity(0)
    folder = sys / "devices/system/cpu"
    return len({_siblings(folder / f"cpu{cpu}", cpu) for cpu in cpus})


def _siblings(folder: Path, cpu: int) -> str:
    try:
        return (folder / "topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
