"""Which backend serves."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from triton import knobs

from quantd.kernels.errors import QuantdError
from quantd.kernels.gpu.ops import GpuOps
from quantd.kernels.gpu.tuning import ROW_CLASSES, Plan, Shape, Tile, Tuning, gpu_of, save_tuning, with_plan
from quantd.kernels.reference import ReferenceOps
from quantd.kernels.select import choose_backend, select_ops


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


def test_without_a_gpu_auto_stays_on_the_cpu_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert choose_backend("auto") == "auto"
    assert "computing on the CPU" in caplog.text
    assert [choose_backend("cpu"), choose_backend("reference")] == ["cpu", "reference"]


def test_a_gpu_that_was_asked_for_is_had_from_the_interpreter_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_backend("gpu") == "gpu"
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    with pytest.raises(QuantdError, match=r"gpu backend cannot run here.*quantd doctor"):
        choose_backend("gpu")


def test_gpu_ops_take_what_they_are_asked_to_and_measured_plans_from_the_cache(tmp_path: Path) -> None:
    device = torch.device("cpu")
    ops = select_ops("gpu", cache=tmp_path, dtype=torch.bfloat16, device=device)
    assert isinstance(ops, GpuOps)
    assert ops.name.endswith(" bf16")
    shape = Shape(64, 64, 4, 64, 16)
    slow = Plan(1, {rows: Tile(16, 64, 4, 2) for rows in ROW_CLASSES})
    save_tuning(tmp_path, with_plan(Tuning(gpu_of(device)), shape, slow))
    measured = select_ops("gpu", cache=tmp_path, device=device)
    assert isinstance(measured, GpuOps)
    assert measured._tuning.plan(shape) == slow
