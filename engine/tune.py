"""Measures how a model's products run best on its GPUs: `python -m quantd.engine.tune CONFIG`.

CONFIG is an EngineConfig in JSON. A line of JSON goes out after each shape of product, with the file that
engines read from then on (see quantd.kernels.gpu.tuning). Ranks need not meet for that: the part of one after
another is brought to the GPU that it would have.
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
from quantd.engine.model_part import set_up
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.models.spec import DecoderSpec
from quantd.engine.rank_messages import StartRank
from quantd.kernels.errors import QuantdError
from quantd.kernels.gpu.linear import tune
from quantd.kernels.gpu.ops import GpuOps
from quantd.kernels.gpu.tiled import shape_of
from quantd.kernels.gpu.tuning import Gpu, Shape, Tuning, load_tuning, save_tuning
from quantd.kernels.gpu.weights import GpuWeight
from quantd.quant.checkpoint import Checkpoint, open_checkpoint


class Tuned(msgspec.Struct, frozen=True):
    """`done` of `total` shapes are measured that a rank's part has, and no part before it on such a GPU.

    path: where the plans of GPUs of this name are kept.
    """

    gpu: str
    rank: int
    done: int
    total: int
    path: str


Measure = Callable[[GpuWeight, torch.dtype, Tuning], Tuning]


def tune_model(config: EngineConfig, measure: Measure = tune) -> Iterator[Tuned]:
    """Measure a plan for each shape of product in a model, as its ranks cut it, and keep it.

    Raises RequestError where the model does not run on GPUs, or what keeps it from being loaded.
    """
    config = with_backend(config)
    if config.backend != "gpu":
        raise RequestError(f"tuning is for models on GPUs, and this one runs on {config.backend}")
    checkpoint = open_checkpoint(Path(config.model_path))
    spec = decoder_spec(checkpoint.config, config.max_model_len)
    world = plan_ranks(config, spec, checkpoint.weight_bytes)
    known: set[tuple[Gpu, Shape]] = set()
    for rank in range(world.size):
        yield from _tune_part(StartRank(config, world, rank, store=""), spec, checkpoint, known, measure)


def _tune_part(
    start: StartRank,
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    known: set[tuple[Gpu, Shape]],
    measure: Measure,
) -> Iterator[Tuned]:
    """What is not `known` yet of a rank's part, on the GPU of that rank. `known` is added to."""
    bench = set_up(start, spec, checkpoint, meets=False)
    ops = bench.ops
    assert isinstance(ops, GpuOps) and start.config.kernel_cache is not None
    packed = bench.load(spec, checkpoint).decoder.weights.packed
    shapes = {shape_of(weight, ops.dtype): weight for weight in packed if isinstance(weight, GpuWeight)}
    weights = [weight for shape, weight in shapes.items() if (ops.gpu, shape) not in known]
    known.update((ops.gpu, shape) for shape in shapes)
    folder = Path(start.config.kernel_cache)
    tuning = load_tuning(folder, ops.gpu)
    for done, weight in enumerate(weights, 1):
        tuning = measure(weight, ops.dtype, tuning)
        path = save_tuning(folder, tuning)
        yield Tuned(ops.gpu.name, start.rank, done, len(weights), str(path))


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
