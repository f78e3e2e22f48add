"""Which ranks there are, where each of them computes, and with how much memory and how many threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from quantd.engine.config import EngineConfig
from quantd.engine.errors import RequestError
from quantd.engine.machine import available_memory
from quantd.engine.memory import workspace_bytes
from quantd.engine.models.spec import DecoderSpec
from quantd.engine.shard import head_shares
from quantd.engine.split import AUTO, World, ends_in_layers, plan_world, stage_memory
from quantd.kernels.gpu.tuning import gpu_of
from quantd.kernels.machine import physical_cores
from quantd.kernels.select import choose_backend, too_old

# Trained in bfloat16 and found to leave fp16's range, whatever type their files have.
_WIDE_RANGE = "gemma"


def with_backend(config: EngineConfig) -> EngineConfig:
    """The config for this machine: "auto" is settled, so that all ranks are of one mind.

    Raises QuantdError for a backend that cannot be had.
    """
    return msgspec.structs.replace(config, backend=choose_backend(config.backend))


def plan_ranks(config: EngineConfig, spec: DecoderSpec, weight_bytes: int) -> World:
    """The ranks that a config asks for; weight_bytes: of the whole model.

    An automatic split fills what GPUs have for weights and blocks alike; a CPU is split into two equal
    stages. Raises RequestError for what cannot be had.
    """
    num_gpus, num_layers = _num_gpus(config), len(spec.layers)
    if not num_gpus:
        world = plan_world(config.tp, config.split, num_layers, (1.0, 1.0), 0)
        head_shares(spec.heads, world.tp)
        return world
    vocabulary = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    ends = ends_in_layers(vocabulary, weight_bytes, num_layers)
    # To ask a GPU takes some of its memory, for this process's context there.
    free = [rank_memory(torch.device("cuda", i)) for i in range(num_gpus)] if config.split == AUTO else []
    kept = config.vram_reserve + workspace_bytes(config, spec)
    rooms = [max(size - kept, 1) for size in free]
    world = plan_world(config.tp, config.split, num_layers, stage_memory(rooms, config.tp), ends)
    head_shares(spec.heads, world.tp)
    if world.size > num_gpus:
        raise RequestError(
            f"tp {config.tp} times {len(world.stages)} stages takes {world.size} GPUs, "
            f"but there are {num_gpus}",
            "tp",
        )
    for i in range(world.size):
        if (fault := too_old(i)) is not None:
            raise RequestError(f"{fault}: hide it with CUDA_VISIBLE_DEVICES", "tp")
    return world


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """Where a rank computes: on the GPU of its number, or on the CPU, which ranks share."""
    return torch.device("cuda", rank) if _num_gpus(config) else torch.device("cpu")


def keeps_bits(config: EngineConfig, num_ranks: int) -> bool:
    """Whether a request's bits are not to depend on who is beside it: as asked, or else where that is fast.

    Without tensor-core products prompts would take three to five times as long, by count: 512 rows are 81 ps
    of arithmetic a weight on an RTX 2080 Ti, 26 by the vendor's product; 135 and 30 on a T4. The same answer
    on every rank.
    """
    if config.same_bits is not None:
        return config.same_bits
    return all(gpu_of(rank_device(config, rank)).has_dots for rank in range(num_ranks))


def rank_memory(device: torch.device) -> int:
    """Bytes free on a device."""
    if device.type != "cuda":
        return available_memory()
    # What loading has left behind is free too.
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def rank_threads(config: EngineConfig, num_ranks: int) -> int:
    """CPU threads of a rank."""
    return config.threads or max(physical_cores() // num_ranks, 1)


def compute_dtype(
    model_config: Mapping[str, Any], spec: DecoderSpec, devices: Sequence[torch.device]
) -> torch.dtype:
    """The type of activations on GPUs that exchange them: that of the model's training as far as is known,
    else fp16.
    """
    stored = model_config.get("dtype") or model_config.get("torch_dtype")
    wants_bf16 = stored == "bfloat16" or spec.model_type.startswith(_WIDE_RANGE)
    return torch.bfloat16 if wants_bf16 and all(map(_has_bf16, devices)) else torch.float16


def _has_bf16(device: torch.device) -> bool:
    """Before sm_80 GPUs have no arithmetic in bfloat16; the interpreter has."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _num_gpus(config: EngineConfig) -> int:
    """GPUs that ranks may have: none for a backend of CPUs, nor for the interpreter."""
    return torch.cuda.device_count() if config.backend == "gpu" else 0
