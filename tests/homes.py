"""Homes of quantd for tests: none is the user's, and all share what is costly to make again."""

from __future__ import annotations

import os
from pathlib import Path

# What is kept from one run to the next: the real model, compiled kernels.
TEST_HOME = Path(
    os.environ.get("QUANTD_TEST_HOME", Path(__file__).parents[1] / "build" / "test-home")
).absolute()


def share_kernels(home: Path) -> None:
    """Make the compiled kernels that are kept the ones of a home (a folder, made if need be)."""
    kept = TEST_HOME / "cache" / "quantd" / "kernels"
    kept.mkdir(parents=True, exist_ok=True)
    cache = home / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    if not (cache / "kernels").exists():
        (cache / "kernels").symlink_to(kept)
