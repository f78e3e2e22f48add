"""Processes that the tests, and what they start, have started."""

from __future__ import annotations

import time

import psutil

# What multiprocessing starts once, and keeps as long as its starter lives.
_TRACKER = "multiprocessing.resource_tracker"


def own_children() -> list[psutil.Process]:
    """All that this process has started, and what they have, but for multiprocessing's own."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if not any(_TRACKER in word for word in _command(child))]


def children_of(parent: psutil.Process, module: str) -> list[psutil.Process]:
    """Children that run a module; one that ends meanwhile is none."""
    return [child for child in parent.children() if module in _command(child)]


def left_after_a_while(before: set[psutil.Process], seconds: float = 30) -> list[list[str]]:
    """The command lines of this process' children that still run after some seconds, but for those before."""
    deadline = time.monotonic() + seconds
    while left := set(own_children()) - before:
        if time.monotonic() > deadline:
            return [_command(process) for process in left]
        time.sleep(0.05)
    return []


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
