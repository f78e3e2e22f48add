"""Which ranks there are, where each of them computes, and with how much memory and how many threads."""

from __future__ import annotations

import torch

from quantd.engine.config import EngineConfig
from quantd.engine.errors import RequestError
from quantd.engine.machine import available_memory
from quantd.engine.models.spec import DecoderSpec
from quantd.engine.shard import head_shares
from quantd.engine.split import World, ends_in_layers, plan_world, stage_memory
from quantd.kernels.machine import physical_cores


def plan_ranks(config: EngineConfig, spec: DecoderSpec, weight_bytes: int) -> World:
    """The ranks that a config asks for; weight_bytes: of the whole model.

    An automatic split fills the memory of all GPUs alike; a CPU is split into two equal stages. Raises
    RequestError for what cannot be had.
    """
    free = _gpu_memory(config)
    num_layers = len(spec.layers)
    if not free:
        world = plan_world(config.tp, config.split, num_layers, (1.0, 1.0), 0)
        head_shares(spec.heads, world.tp)
        return world
    vocabulary = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    ends = ends_in_layers(vocabulary, weight_bytes, num_layers)
    world = plan_world(config.tp, config.split, num_layers, stage_memory(free, config.tp), ends)
    if world.size > len(free):
        raise RequestError(
            f"tp {config.tp} times {len(world.stages)} stages takes {world.size} GPUs, "
            f"but there are {len(free)}",
            "tp",
        )
    return world


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Where a rank computes: on the GPU of its number, or on the CPU, which ranks share."""
    return torch.device("cuda", rank) if _gpu_memory(config) else torch.device("cpu")


def rank_memory(device: torch.device) -> int:
    """Bytes free on a device."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


def rank_threads(config: EngineConfig, num_ranks: int) -> int:
    """CPU threads of a rank."""
    return config.threads or max(physical_cores() // num_ranks, 1)


def _gpu_memory(config: EngineConfig) -> list[int]:
    """Bytes free on each GPU, in the order of their numbers; empty where the backend is one of CPUs."""
    if config.backend in ("auto", "reference", "cpu"):
        return []
    return [torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())]
