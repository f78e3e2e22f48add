"""What loading a model would take: `python -m quantd.engine.planning CONFIG`, an EngineConfig in JSON.

Prints a MemoryPlan, or Failed, as JSON. A process of its own, since torch is what knows of GPUs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from quantd.engine.config import EngineConfig
from quantd.engine.devices import plan_ranks, rank_device, rank_memory, with_backend
from quantd.engine.faults import describe, kind_of
from quantd.engine.footprint import Footprint, foresee
from quantd.engine.memory import workspace_bytes
from quantd.engine.memory_plan import MemoryPlan, plan_memory
from quantd.engine.messages import Failed
from quantd.engine.model_part import set_up
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.rank_messages import StartRank
from quantd.engine.split import World
from quantd.kernels.errors import QuantdError
from quantd.quant.checkpoint import open_checkpoint


def plan_load(config: EngineConfig) -> MemoryPlan:
    """The plan of a load that begins now. Raises what would keep it from beginning."""
    config = with_backend(config)
    checkpoint = open_checkpoint(Path(config.model_path))
    spec = decoder_spec(checkpoint.config, config.max_model_len)
    world = plan_ranks(config, spec, checkpoint.weight_bytes)
    alone = World(1, ((0, len(spec.layers)),))
    ops = set_up(StartRank(config, alone, 0, store=""), spec, checkpoint).ops
    footprint = Footprint(spec, checkpoint, ops)
    footprint.check()
    devices = dict.fromkeys(rank_device(config, rank) for rank in range(world.size))
    free = {str(device): rank_memory(torch.device(device)) for device in devices}
    ranks = foresee(config, world, footprint, spec, free)
    workspace = workspace_bytes(config, spec)
    return plan_memory(config, ops.name, spec.max_model_len, ranks, workspace)


def main(arguments: list[str]) -> int:
    """Be the process; the exit status."""
    config = msgspec.json.decode(arguments[0], type=EngineConfig)
    try:
        answer: MemoryPlan | Failed = plan_load(config)
    except QuantdError as error:
        answer = Failed(kind_of(error), describe(error))
    print(msgspec.json.encode(answer).decode(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
