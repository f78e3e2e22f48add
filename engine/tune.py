"""Measures how a model's products run best on this GPU: `python -m quantd.engine.tune CONFIG`.

CONFIG is an EngineConfig in JSON. A line of JSON goes out after each shape of product, the last of all with
the file that engines read from then on (see quantd.kernels.gpu.tuning).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from quantd.engine.config import EngineConfig
from quantd.engine.devices import plan_ranks, with_backend
from quantd.engine.errors import RequestError
from quantd.engine.model_part import load_part
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.rank_messages import StartRank
from quantd.kernels.errors import QuantdError
from quantd.kernels.gpu.linear import tune
from quantd.kernels.gpu.ops import GpuOps
from quantd.kernels.gpu.tiled import shape_of
from quantd.kernels.gpu.tuning import Shape, Tuning, load_tuning, save_tuning
from quantd.kernels.gpu.weights import GpuWeight
from quantd.quant.checkpoint import open_checkpoint


class Tuned(msgspec.Struct, frozen=True):
    """`done` of `total` shapes are measured; path: where the plans are kept."""

    done: int
    total: int
    path: str


Measure = Callable[[GpuWeight, torch.dtype, Tuning], Tuning]


def tune_model(config: EngineConfig, measure: Measure = tune) -> Iterator[Tuned]:
    """Measure a plan for each shape of product in a model, and keep it.

    Raises RequestError where the model does not run on one GPU, or what keeps it from being loaded.
    """
    ops, weights = _load(config)
    assert config.kernel_cache is not None
    folder = Path(config.kernel_cache)
    tuning = load_tuning(folder, ops.gpu)
    for done, weight in enumerate(weights.values(), 1):
        tuning = measure(weight, ops.dtype, tuning)
        yield Tuned(done, len(weights), str(save_tuning(folder, tuning)))


def _load(config: EngineConfig) -> tuple[GpuOps, dict[Shape, GpuWeight]]:
    """The op table, and a weight of each shape that its kernels multiply with."""
    config = with_backend(config)
    checkpoint = open_checkpoint(Path(config.model_path))
    spec = decoder_spec(checkpoint.config, config.max_model_len)
    world = plan_ranks(config, spec, checkpoint.weight_bytes)
    if config.backend != "gpu" or world.size > 1:
        raise RequestError(f"tuning is for a model on one GPU, and this one runs on {config.backend}")
    decoder = load_part(StartRank(config, world, 0, ""), spec, checkpoint).decoder
    ops = decoder.ops
    assert isinstance(ops, GpuOps)
    weights = [weight for weight in decoder.weights.packed if isinstance(weight, GpuWeight)]
    return ops, {shape_of(weight, ops.dtype): weight for weight in weights}


def main(arguments: list[str]) -> int:
    """Be the process; the exit status."""
    config = msgspec.json.decode(arguments[0], type=EngineConfig)
    try:
        for tuned in tune_model(config):
            print(msgspec.json.encode(tuned).decode(), flush=True)
    except QuantdError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
