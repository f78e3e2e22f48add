"""Which backend serves."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from quantd.kernels.errors import QuantdError
from quantd.kernels.reference import ReferenceOps
from quantd.kernels.select import select_ops


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/cc")


def test_the_reference_serves_where_asked() -> None:
    assert isinstance(select_ops("reference"), ReferenceOps)


def test_the_cpu_backend_is_taken_where_it_can_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, Path]] = []
    built = ReferenceOps()

    def load_ops(activations: str, threads: int, cache: Path) -> ReferenceOps:
        asked.append((activations, threads, cache))
        return built

    monkeypatch.setattr("quantd.kernels.cpu.load_ops", load_ops, raising=False)
    assert select_ops("auto", "fp32", 3, Path("/c")) is select_ops("cpu", "fp32", 3, Path("/c")) is built
    assert asked == [("fp32", 3, Path("/c"))] * 2


@pytest.mark.usefixtures("no_compiler")
def test_without_a_compiler_the_reference_serves_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(select_ops("auto", cache=tmp_path), ReferenceOps)
    assert len(caplog.records) == 1 and "/nowhere/cc" in caplog.text


@pytest.mark.usefixtures("no_compiler")
def test_a_cpu_backend_that_was_asked_for_is_never_replaced(tmp_path: Path) -> None:
    with pytest.raises(QuantdError, match="C compiler"):
        select_ops("cpu", cache=tmp_path)
