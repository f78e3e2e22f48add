"""The machine under quantd: processor, compiler, kernels, memory."""

from __future__ import annotations

import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from quantd.daemon.cli.output import format_bytes
from quantd.daemon.config import named_compiler
from quantd.daemon.doctor.finding import Finding, install_command, read_text

_CPU_FEATURES = ("avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512_vnni", "amx_int8", "asimddp", "i8mm")
_PROBE = (
    "import pathlib, sys; from quantd.kernels.select import select_ops; "
    "print(select_ops(cache=pathlib.Path(sys.argv[1])).name)"
)
_LITTLE_MEMORY = 2 * 2**30
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_MEMINFO = Path("/proc/meminfo")


def look_at_processor(kernel_cache: Path) -> Iterator[Finding]:
    """What it can, what compiles for it, and which kernels an engine would take."""
    yield Finding("processor", "machine", platform.machine())
    found = [name for name in _CPU_FEATURES if name in _cpu_features()]
    yield Finding("processor", "features", " ".join(found) or "none of those looked for")
    yield _compiler()
    yield _kernels(kernel_cache)


def _compiler() -> Finding:
    name = named_compiler() or "cc"
    if shutil.which(name.split()[0]) is None:
        return Finding(
            "processor",
            "compiler",
            "none",
            fault=f"there is no C compiler {name!r}, so the fast CPU kernels cannot be built",
            fix=install_command("gcc") if name == "cc" else "unset CC",
        )
    told = subprocess.run([*name.split(), "--version"], capture_output=True, text=True, check=False).stdout
    return Finding("processor", "compiler", f"{name}: {(told.splitlines() or ['of unknown version'])[0]}")


def _kernels(cache: Path) -> Finding:
    """The backend that an engine would take, asked of a process of its own, since it needs torch."""
    probe = subprocess.run(
        [sys.executable, "-P", "-c", _PROBE, str(cache)], capture_output=True, text=True, check=False
    )
    told = "; ".join(line for line in (probe.stdout + probe.stderr).splitlines()[-3:] if line.strip())
    if probe.returncode:
        return Finding(
            "processor", "kernels", "none", fault=f"no kernels can be chosen: {told}", fix="pip install torch"
        )
    if "reference" in told:
        return Finding(
            "processor",
            "kernels",
            told,
            fault="the slow reference kernels would run; the compiler's messages are above them",
            fix=f"let {shlex.quote(str(cache))} be written"
            if "cannot hold" in told
            else install_command("gcc"),
        )
    return Finding("processor", "kernels", told)


def _cpu_features() -> set[str]:
    """The flags that Linux lists; elsewhere none are known."""
    lines = (read_text(Path("/proc/cpuinfo")) or "").splitlines()
    listed = [line.split(":", 1)[1] for line in lines if line.startswith(("flags", "Features"))]
    return {flag for flags in listed for flag in flags.split()}


def look_at_memory(
    meminfo: Path = _MEMINFO, huge_pages: Path = _HUGE_PAGES, overcommit: Path = _OVERCOMMIT
) -> Iterator[Finding]:
    """How much there is, and what rules keep it from being used well."""
    text = read_text(meminfo)
    if text is not None:
        yield _amount(text)
    if (told := read_text(huge_pages)) is not None:
        yield _huge_pages(told)
    if (told := read_text(overcommit)) is not None:
        yield _overcommit(told)
    yield _limit()


def _amount(meminfo: str) -> Finding:
    sizes = {name: 1024 * int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", meminfo, re.M)}
    free, total = sizes.get("MemAvailable", 0), sizes.get("MemTotal", 0)
    value = f"{format_bytes(free)} of {format_bytes(total)} free"
    if free >= _LITTLE_MEMORY:
        return Finding("memory", "ram", value)
    return Finding(
        "memory",
        "ram",
        value,
        note="little is free: a small model fits, maybe with a short context",
        fix="quantd ps shows models in memory, quantd unload NAME lets one go",
    )


def _huge_pages(told: str) -> Finding:
    chosen = told.partition("[")[2].partition("]")[0]
    if chosen != "never":
        return Finding("memory", "huge pages", chosen)
    return Finding(
        "memory",
        "huge pages",
        chosen,
        note="weights are read more slowly through small pages",
        fix=f"echo madvise | sudo tee {_HUGE_PAGES}",
    )


def _overcommit(told: str) -> Finding:
    if told != "2":
        return Finding("memory", "overcommit", {"0": "as usual", "1": "always"}.get(told, told))
    return Finding(
        "memory",
        "overcommit",
        "never",
        fault="the kernel wants memory for the whole KV cache at once, of which most is never written",
        fix="sudo sysctl vm.overcommit_memory=0",
    )


def _limit() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        return Finding("memory", "limit", "none")
    return Finding(
        "memory",
        "limit",
        format_bytes(soft),
        fault="a process may only have so much address space, which models are mapped into",
        fix="ulimit -v unlimited",
    )
