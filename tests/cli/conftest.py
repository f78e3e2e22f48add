"""The real `quantd` command, and a stand-in daemon to run it against."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon, Quantd
from waiting import PATIENCE


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A folder for sockets: their paths have at most 107 bytes, and pytest's folders can be longer."""
    with tempfile.TemporaryDirectory(prefix="qd-") as folder:
        yield folder


@pytest.fixture
def fake_daemon(short_folder: str) -> Iterator[FakeDaemon]:
    with FakeDaemon(Path(short_folder)) as daemon:
        yield daemon


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Nothing of the user's own quantd is seen or touched."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("QUANTD_")}
    return kept | {"QUANTD_HOME": str(tmp_path / "home")}


@pytest.fixture
def quantd(environment: dict[str, str]) -> Quantd:
    def run(*args: str, input: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [Path(sys.executable).with_name("quantd"), *args],
            input=input,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=environment | variables,
        )

    return run
