"""What all tests share: a home that is not the user's, and checkpoints to load."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from homes import TEST_HOME, share_kernels
from processes import left_after_a_while, own_children

from quantd.daemon.store import Store


def _has_gpu() -> bool:
    """Torch, slow to import, is asked only where there is a driver at all."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    import torch

    return torch.cuda.is_available()


# Triton looks at it when a kernel is defined, so it is set before any test module imports one.
if not _has_gpu():
    os.environ["TRITON_INTERPRET"] = "1"

# How fast a busy machine is, is no test. The same examples each time: what is new is for `make fuzz` to find.
hypothesis.settings.register_profile("quantd", deadline=None, derandomize=True)
hypothesis.settings.load_profile("quantd")

FIXTURES = Path(__file__).parent / "data" / "fixtures"


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests, and the processes that they start, an empty home of quantd and a cache of their own."""
    # A shell's job in the background has it ignored, which what the tests start would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings = [name for name in os.environ if name.startswith("QUANTD_") and name != "QUANTD_TEST_HOME"]
    for name in settings:
        del os.environ[name]
    home = tempfile.mkdtemp(prefix="quantd-")
    os.environ["QUANTD_HOME"] = home
    share_kernels(Path(home))
    share_kernels(TEST_HOME)
    os.environ["XDG_CACHE_HOME"] = str(TEST_HOME / "cache")
    os.environ["TRITON_CACHE_DIR"] = str(TEST_HOME / "cache" / "triton")
    config.add_cleanup(lambda: shutil.rmtree(home, ignore_errors=True))


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    """One that stays is named where it was started, not by whichever later test counts its own."""
    before = set(own_children())
    yield
    assert left_after_a_while(before) == []


@pytest.fixture(scope="session")
def fixture_folders() -> dict[str, Path]:
    """Small checkpoints that other tools wrote, by name."""
    return {folder.name: folder for folder in sorted(FIXTURES.iterdir())}


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the small real model, fetched by the first run that needs it."""
    return Store(TEST_HOME / "models").pull("smollm2").path
