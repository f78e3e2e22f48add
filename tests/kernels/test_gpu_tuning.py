"""Launch plans: shipped ones fit every GPU, measured ones survive in a file, a damaged file is not used."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quantd.kernels.gpu import linear
from quantd.kernels.gpu.linear import tune
from quantd.kernels.gpu.targets import SHARED_MEMORY
from quantd.kernels.gpu.tiled import cut
from quantd.kernels.gpu.tuning import (
    INTERPRETED,
    ROW_CLASSES,
    Gpu,
    Plan,
    Shape,
    Tile,
    Tuning,
    default_plan,
    gpu_of,
    load_tuning,
    row_class,
    save_tuning,
    search,
    tuning_path,
    with_plan,
)
from quantd.kernels.gpu.weights import pack
from quantd.kernels.weights import DenseWeight

H200 = Gpu("NVIDIA H200", 90, 132)
SHAPES = [
    Shape(8192, 8192, 4, 128, 16),
    Shape(1024, 4096, 4, 32, 16),
    Shape(28672, 8192, 3, 64, 16),
    Shape(128256, 4096, 8, 16, 16),
    Shape(14336, 4096, 8, 128, 8),
    Shape(4096, 576, 16, 64, 16),
    Shape(37, 80, 4, 16, 32),
]
PLAN = Plan(3, {rows: Tile(16, 64, 4, 3) for rows in ROW_CLASSES})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("capability", SHARED_MEMORY)
@pytest.mark.parametrize("num_sms", [14, 132])
def test_shipped_plans_fit(shape: Shape, capability: int, num_sms: int) -> None:
    gpu = Gpu("any", capability, num_sms)
    plan = default_plan(shape, gpu)
    split_blocks, splits = cut(shape, plan.splits)
    assert split_blocks % shape.blocks_per_step == 0
    assert (splits - 1) * split_blocks < shape.num_blocks <= splits * split_blocks
    for rows in ROW_CLASSES:
        tile = plan.tile(rows)
        step_k = shape.block_k * shape.blocks_per_step
        stage = step_k * (tile.block_n * shape.bits + tile.block_m * shape.input_bits) // 8
        buffers = tile.num_stages if capability == 90 else tile.num_stages - 1
        assert buffers * stage <= gpu.shared_bytes or tile.num_stages == 2
    assert plan == default_plan(shape, gpu)


def test_few_rows_keep_a_large_gpu_busy() -> None:
    for shape in SHAPES[:1]:
        plan = default_plan(shape, H200)
        assert shape.n // plan.tile(1).block_n * plan.splits >= 1.9 * H200.num_sms
    assert default_plan(SHAPES[3], H200).splits == 1


def test_rows_have_classes() -> None:
    assert [row_class(rows) for rows in (1, 16, 17, 32, 33, 64, 65, 5000)] == [16, 16, 32, 32, 64, 64, 64, 64]


def test_a_gpu_not_known_has_the_memory_of_an_older_one() -> None:
    assert Gpu("new", 103, 100).shared_bytes == SHARED_MEMORY[90]
    assert Gpu("old", 70, 80).shared_bytes == SHARED_MEMORY[75]


def test_the_interpreter_stands_for_a_gpu() -> None:
    assert gpu_of(torch.device("cpu")) == INTERPRETED


def test_measured_plans_come_back(tmp_path: Path) -> None:
    tuning = with_plan(with_plan(Tuning(H200), SHAPES[0], PLAN), SHAPES[1], default_plan(SHAPES[1], H200))
    path = save_tuning(tmp_path / "new folder", tuning)
    assert path == tuning_path(tmp_path / "new folder", H200) and path.name == "nvidia-h200.json"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    loaded = load_tuning(path.parent, H200)
    assert loaded == tuning
    assert loaded.plan(SHAPES[0]) == PLAN
    assert loaded.plan(SHAPES[2]) == default_plan(SHAPES[2], H200)
    assert load_tuning(path.parent, Gpu("another", 89, 46)).measured == {}


def test_a_file_is_written_over_as_a_whole(tmp_path: Path) -> None:
    save_tuning(tmp_path, with_plan(Tuning(H200), SHAPES[0], PLAN))
    save_tuning(tmp_path, Tuning(H200))
    assert load_tuning(tmp_path, H200).measured == {}


def _with_entry(text: str, **changes: object) -> str:
    """The file with its one plan changed."""
    record = json.loads(text)
    return json.dumps({**record, "plans": [{**record["plans"][0], **changes}]})


DAMAGES: dict[str, Callable[[str], str]] = {
    "cut off": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no object": lambda text: "[1, 2]",
    "version": lambda text: text.replace('"version": 1', '"version": 99'),
    "warps": lambda text: text.replace('"num_warps": 4', '"num_warps": 3'),
    "no splits": lambda text: _with_entry(text, splits=0),
    "no tiles": lambda text: _with_entry(text, tiles={}),
    "shape": lambda text: _with_entry(text, shape={"n": 3}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_not_used(
    damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_tuning(tmp_path, with_plan(Tuning(H200), SHAPES[0], PLAN))
    text = path.read_text()
    path.write_text(DAMAGES[damage](text))
    assert path.read_text() != text
    with caplog.at_level(logging.WARNING):
        assert load_tuning(tmp_path, H200) == Tuning(H200)
    assert str(path) in caplog.text and "as shipped" in caplog.text


def test_a_file_that_is_no_text_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuning_path(tmp_path, H200).write_bytes(b"\xff\x00")
    assert load_tuning(tmp_path, H200) == Tuning(H200)
    assert "as shipped" in caplog.text


def test_the_fastest_plan_is_found() -> None:
    """A GPU that likes 6 splits, tiles of 64 outputs, and two row blocks where rows are many."""

    def measure(rows: int, splits: int, tile: Tile) -> float:
        if tile.num_stages == 6 and rows > 16:
            return math.inf  # does not fit
        wanted = {16: 16, 32: 32, 64: 32}[row_class(rows)]
        return abs(splits - 6) + (tile.block_n != 64) + (tile.block_m != wanted) + 1 / tile.num_stages

    plan = search(SHAPES[0], H200, measure)
    assert plan.splits == 6
    for rows, block_m in ((16, 16), (32, 32), (64, 32)):
        tile = plan.tile(rows)
        assert (tile.block_m, tile.block_n, tile.num_stages) == (block_m, 64, 6 if rows <= 16 else 5)


def test_short_inputs_are_not_cut_to_pieces() -> None:
    tried = set()

    def measure(rows: int, splits: int, tile: Tile) -> float:
        tried.add(splits)
        return 1.0

    search(Shape(64, 512, 4, 128, 16), H200, measure)
    assert tried == {1, 2}


def test_few_launches_are_tried_as_each_is_compiled_first() -> None:
    tried = set()

    def measure(rows: int, splits: int, tile: Tile) -> float:
        tried.add((rows, splits, tile))
        return 1.0

    search(SHAPES[0], H200, measure)
    assert len({(rows, tile) for rows, _, tile in tried}) <= 40


@pytest.mark.parametrize(("capability", "launched"), [(75, "gemv"), (80, "matmul")])
def test_what_is_timed_is_what_the_gpu_will_launch(
    capability: int, launched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = set()

    def time(run: Callable[[], object]) -> float:
        run()
        return 1.0

    monkeypatch.setattr(linear, "do_bench", time)
    for name in ("gemv", "matmul"):
        monkeypatch.setattr(linear, name, lambda *_, name=name: called.add(name))
    weight = pack(DenseWeight(torch.randn(32, 128)), None, "cpu", torch.float16)
    tuned = tune(weight, torch.float16, Tuning(Gpu("some", capability, 40)))
    assert called == {launched} and len(tuned.measured) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times kernels on a GPU, and there is none here")
def test_a_shape_is_tuned_on_the_gpu() -> None:
    weight = pack(DenseWeight(torch.randn(256, 512)), None, "cuda", torch.float16)
    tuned = tune(weight, torch.float16, Tuning(gpu_of(torch.device("cuda"))))
    assert len(tuned.measured) == 1
