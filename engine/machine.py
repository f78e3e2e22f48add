"""How much memory this machine lets a process have (Linux, torch-free)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup v1 spells "no limit" as a number near 2**63
_PROC = Path("/proc")
_SYS = Path("/sys")


def available_memory(proc: Path = _PROC, sys: Path = _SYS) -> int:
    """Bytes that can be taken without swapping: what the kernel calls available, within all cgroup limits."""
    return max(0, min([_mem_available(proc), *_cgroup_rooms(proc, sys / "fs/cgroup")]))


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/meminfo has no MemAvailable: Linux before 3.14")


def _cgroup_rooms(proc: Path, root: Path) -> Iterator[int]:
    """Bytes left under the limit of each cgroup, v1 or v2, that this process is in, ancestors included."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, limit, usage = root, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            folder, limit, usage = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = folder / path.lstrip("/")
        for ancestor in (group, *group.parents):
            yield from _room(ancestor, limit, usage)
            if ancestor == folder:
                break


def _room(group: Path, limit_file: str, usage_file: str) -> Iterator[int]:
    try:
        limit = (group / limit_file).read_text().strip()
        usage = int((group / usage_file).read_text())
        stat = (group / "memory.stat").read_text()
    except OSError:
        return  # The root has no limit; a container may not see its ancestors.
    if limit != "max" and int(limit) < _UNLIMITED:
        yield int(limit) - usage + _reclaimable(stat)


def _reclaimable(stat: str) -> int:
    """File cache that the kernel drops on demand, which counts as usage (a memory.stat's text)."""
    return sum(int(line.split()[1]) for line in stat.splitlines() if line.startswith("inactive_file "))
