"""Processes that the tests' own ones have started."""

from __future__ import annotations

import psutil


def children_of(parent: psutil.Process, module: str) -> list[psutil.Process]:
    """Children that run a module; one that ends meanwhile is none."""
    return [child for child in parent.children() if module in _command(child)]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
