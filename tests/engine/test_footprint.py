"""Sizes foreseen from headers are those of the packed weights, for every format and backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf_files import tiny_model, write_model, write_tiny

from quantd.engine.config import EngineConfig
from quantd.engine.errors import CapacityError
from quantd.engine.footprint import Footprint
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.planning import plan_load
from quantd.engine.runner import build_runner
from quantd.engine.shard import Part
from quantd.engine.weights import load_weights
from quantd.kernels.cpu import load_ops
from quantd.kernels.gpu.ops import GpuOps
from quantd.kernels.ops import Ops
from quantd.kernels.reference import ReferenceOps
from quantd.quant import stand_in
from quantd.quant.checkpoint import Checkpoint, open_checkpoint
from quantd.quant.gguf import decode_blocks
from quantd.quant.gguf_blocks import BLOCK_FORMATS
from quantd.quant.gguf_import import import_gguf

FIXTURES = sorted((Path(__file__).parents[1] / "data" / "fixtures").iterdir())
# Whole blocks of 256, and a vocabulary that no step divides.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 297}


@pytest.fixture(scope="module", params=["reference", "cpu", "gpu"])
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "gpu":
        return GpuOps("cpu", torch.float16)
    found = ReferenceOps() if request.param == "reference" else load_ops(threads=1)
    assert found is not None
    return found


def check(checkpoint: Checkpoint, ops: Ops, may_be_less: bool = False) -> None:
    spec = decoder_spec(checkpoint.config)
    footprint = Footprint(spec, checkpoint, ops)
    footprint.check()
    for part in (Part(range(len(spec.layers))), Part(range(1, len(spec.layers)))):
        found = load_weights(spec, checkpoint, ops, lambda done, total: None, part)
        size = footprint.weight_bytes(part)
        assert size == found.nbytes or (may_be_less and found.nbytes < size < 1.1 * found.nbytes)


@pytest.mark.parametrize("folder", FIXTURES, ids=lambda folder: folder.name)
def test_checkpoints_of_other_tools(folder: Path, ops: Ops) -> None:
    check(open_checkpoint(folder), ops)


def imported(path: Path) -> Checkpoint:
    import_gguf(path, path.parent / "model")
    return open_checkpoint(path.parent / "model")


@pytest.fixture(scope="module", params=["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def gguf(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp(request.param)
    write_model(folder / "model.gguf", tiny_model("llama", **SIZES), "llama", Kind[request.param])
    return imported(folder / "model.gguf")


def test_gguf_types(gguf: Checkpoint, ops: Ops) -> None:
    check(gguf, ops, may_be_less=isinstance(ops, GpuOps))


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_stand_ins_take_what_random_blocks_do(kind: str, ops: Ops) -> None:
    layout = BLOCK_FORMATS[kind]
    with np.errstate(all="ignore"):
        blocks = np.random.default_rng(1).integers(0, 256, (2000, layout.nbytes), np.uint8)
        finite = np.isfinite(np.concatenate(layout.decode(blocks)[1:], 1)).all(1)
    rows = blocks[finite][: 48 * 3].reshape(48, -1)
    found = ops.pack(decode_blocks(rows, kind)).nbytes
    assert ops.pack(stand_in.blocks((48, 3 * layout.block), layout)).nbytes == found


def test_quantized_embeddings(tmp_path: Path, ops: Ops) -> None:
    write_tiny(tmp_path / "model.gguf")
    check(imported(tmp_path / "model.gguf"), ops)


@pytest.mark.parametrize(("model_type", "options"), [("qwen2", {}), ("llama", {"tie_word_embeddings": True})])
def test_biases_and_tied_plain_weights(
    model_type: str, options: dict[str, Any], tmp_path: Path, ops: Ops
) -> None:
    tiny_model(model_type, **SIZES, **options).to(torch.bfloat16).save_pretrained(tmp_path)
    check(open_checkpoint(tmp_path), ops)


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model_path=str(folder), threads=1, **options)


@pytest.mark.parametrize("options", [{"kv_memory": 1 << 20}, {"kv_dtype": "fp16", "max_num_requests": 2}])
def test_a_plan_says_what_the_load_then_does(options: dict[str, Any]) -> None:
    config = config_of(FIXTURES[0], **options)
    plan, info = plan_load(config), build_runner(config, lambda done, total: None).info
    assert (plan.weight_bytes, plan.num_blocks, plan.kv_bytes) == (
        info.weight_bytes,
        info.num_blocks,
        info.kv_bytes,
    )
    assert (plan.backend, plan.max_model_len) == (info.backend, info.max_model_len)


def test_the_plan_of_the_small_real_model(smollm2: Path) -> None:
    config = config_of(smollm2, kv_memory=1 << 24)
    plan, info = plan_load(config), build_runner(config, lambda done, total: None).info
    assert (plan.weight_bytes, plan.kv_bytes) == (info.weight_bytes, info.kv_bytes)


def test_what_cannot_fit_is_refused_before_a_weight_is_read() -> None:
    read: list[int] = []
    config = config_of(FIXTURES[0], kv_memory=1 << 60, max_num_requests=1 << 30)
    with pytest.raises(CapacityError, match=r"(?s)was asked for.*\n  weights .*\n  wanting") as caught:
        build_runner(config, lambda done, total: read.append(done))
    assert not read and caught.value.shortage > 1 << 40
