"""Compiling `csrc` on the machine that runs it, once: a shared library in a cache folder.

A library's file name is a hash of the sources, the compiler, the flags and the CPU, so none is ever
stale, and it is moved into place whole, so two processes may build at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

Variant = Literal["native", "avx2", "portable", "sanitized"]

_BUILDING = "building-"
_ABANDONED_SECONDS = 3600.0
_SOURCES = Path(__file__).parent / "csrc"
# No contraction: where a multiply and an add are one operation, the source says fma, on every path.
_FLAGS = ["-std=gnu99", "-O3", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-pthread"]
# Each variant's flags, in the order they are tried; "native" takes the best path of this CPU.
_VARIANTS: dict[Variant, tuple[list[str], ...]] = {
    "native": (["-march=native"], ["-mcpu=native"], []),
    "avx2": (["-march=x86-64-v3"],),
    "portable": (["-march=native", "-DQD_PORTABLE"], ["-DQD_PORTABLE"]),
    "sanitized": (["-march=native", "-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover"],),
}


class BuildError(Exception):
    """Why there is no library; stays inside this package."""


def default_cache() -> Path:
    """The user's cache folder for libraries.

    XDG_CACHE_HOME is read here and not in the daemon's configuration because it is the system's
    setting, not quantd's; the same holds for CC in `compiler`.
    """
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if root.startswith("/") else Path.home() / ".cache") / "quantd" / "kernels"


def compiler() -> list[str]:
    """The command of the C compiler: $CC, or the first of cc, gcc and clang. Raises BuildError."""
    if os.environ.get("CC"):
        return shlex.split(os.environ["CC"])
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name):
            return [name]
    raise BuildError("there is no C compiler (cc, gcc or clang)")


def build(variant: Variant = "native", cache: Path | None = None) -> Path:
    """The library of a variant, compiled unless the cache has it. Raises BuildError."""
    command = compiler()
    version = _output([*command, "--version"])
    failure = BuildError(f"{command[0]} accepts none of the flags")
    for flags in _VARIANTS[variant]:
        try:
            return _cached([*command, *_FLAGS, *flags], version, cache or default_cache())
        except BuildError as error:
            failure = error
    raise failure


def _cached(command: list[str], version: str, cache: Path) -> Path:
    digest = hashlib.sha256("\0".join([*command, version, _cpu()]).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    target = cache / f"cpu-{digest.hexdigest()[:24]}.so"
    if target.exists():
        return target
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _in_turn(cache):
            if not target.exists():
                _sweep(cache)
                _put(command, cache, target)
    except OSError as error:
        raise BuildError(f"{cache} cannot hold the library: {error}") from error
    return target


@contextlib.contextmanager
def _in_turn(cache: Path) -> Iterator[None]:
    """One build at a time, so that of processes that start together the first builds for all.

    Where a folder cannot be locked they all build.
    """
    folder = os.open(cache, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _put(command: list[str], cache: Path, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=_BUILDING, dir=cache) as folder:
        _compile(command, Path(folder)).replace(target)


def _sweep(cache: Path) -> None:
    """Clear what builds left that were killed."""
    for folder in cache.glob(f"{_BUILDING}*"):
        with contextlib.suppress(OSError):  # another may end or clear it just now
            if time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(folder)


def _compile(command: list[str], folder: Path) -> Path:
    """Each source to an object, a few at a time, then all to one library."""
    logger.info("compiling the cpu kernels for this machine")
    objects = {source: folder / f"{source.stem}.o" for source in sorted(_SOURCES.glob("*.c"))}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = [[*command, "-c", str(source), "-o", str(object)] for source, object in objects.items()]
        list(pool.map(_output, jobs))
    library = folder / "library.so"
    _output([*command, "-shared", *map(str, objects.values()), "-o", str(library), "-lm"])
    return library


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{command[0]} does not start: {error}") from error
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed: {done.stderr.strip()[:500]}")
    return done.stdout


def _cpu() -> str:
    """What tells one kind of CPU from another, for home folders that several machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine() + platform.processor()
    wanted = ("flags", "Features", "model name", "CPU part")
    return platform.machine() + "".join(sorted({line for line in lines if line.startswith(wanted)}))
