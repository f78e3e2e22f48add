"""Processes that the tests' own ones have started."""

from __future__ import annotations

import time

import psutil


def commands_after_a_while(before: set[psutil.Process], seconds: float = 5) -> list[list[str]]:
    """The command lines of this process' children that still run after some seconds, but for those before."""
    deadline = time.monotonic() + seconds
    while left := set(psutil.Process().children(recursive=True)) - before:
        if time.monotonic() > deadline:
            return [_command(process) for process in left]
        time.sleep(0.05)
    return []


def children_of(parent: psutil.Process, module: str) -> list[psutil.Process]:
    """Children that run a module; one that ends meanwhile is none."""
    return [child for child in parent.children() if module in _command(child)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
