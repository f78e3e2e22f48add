"""What all tests share: a home that is not the user's, and checkpoints to load."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from homes import TEST_HOME, share_kernels
from processes import left_after_a_while, own_children

from quantd.daemon.store import Store

# How fast a busy machine is, is no test. The same examples each time: what is new is for `make fuzz` to find.
hypothesis.settings.register_profile("quantd", deadline=None, derandomize=True)
hypothesis.settings.load_profile("quantd")

FIXTURES = Path(__file__).parent / "data" / "fixtures"


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--gpu`, which `make test` gives to a second run on a machine that has one."""
    parser.addoption("--gpu", action="store_true", help="run test_gpu_*.py alone, on the GPU")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --gpu all but the tests of the GPU backend."""
    is_other = collection_path.is_file() and not collection_path.name.startswith("test_gpu_")
    return True if config.getoption("--gpu") and is_other else None


def _settle_gpu(wanted: bool) -> None:
    """Have tests, and what they start, see this machine's GPU, or none, so that they test the same anywhere.

    Triton looks at its variable when a kernel is defined, so no test module is imported yet.
    """
    assert "triton" not in sys.modules
    if not wanted:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ["TRITON_INTERPRET"] = "1"
        return
    os.environ.pop("TRITON_INTERPRET", None)
    import torch

    if not torch.cuda.is_available():
        pytest.exit("--gpu: torch finds no GPU here", 1)


def _share_cores() -> None:
    """There is a worker for each core: threads of torch's would only wait for each other."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests, and the processes that they start, an empty home of quantd and a cache of their own."""
    _share_cores()
    _settle_gpu(config.getoption("--gpu"))
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
def numbers_of_a_module() -> None:
    """Random numbers do not depend on which tests ran before."""
    _seed()


@pytest.fixture(autouse=True)
def numbers_of_a_test(numbers_of_a_module: None) -> None:
    """As those of a module."""
    _seed()


def _seed() -> None:
    """Torch is slow to import, so it is not, here."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def threads_of_a_module() -> Iterator[None]:
    """An engine in this process sets torch's number of threads, which later modules do not inherit."""
    torch = sys.modules.get("torch")
    before = torch and torch.get_num_threads()
    yield
    if torch is not None:
        torch.set_num_threads(before)


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
