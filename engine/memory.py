"""How many blocks the KV pool gets: plain arithmetic (torch-free). Sizes in bytes, lengths in tokens."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quantd.engine.config import EngineConfig
from quantd.engine.errors import CapacityError
from quantd.engine.rank_messages import RankLoaded

if TYPE_CHECKING:
    from quantd.engine.models.spec import DecoderSpec

PROMPT_ROWS = 64
"""Logits of so many prompt positions are in memory at a time."""

_MIN_RESERVE = 1 << 30
_SHARE = 4  # A desktop has other uses for its memory than old prefixes: one part in so many of what is free.
LEAST_LEN = 2048
"""Tokens. A context shorter than this, unless asked for, would surprise."""

GOOD_LEN = 8192
"""Tokens. For a context up to this, models that nobody uses had better go."""

_LIBRARY_BYTES = 256 << 20


class Room(NamedTuple):
    """What a device has for its part of a pool. free: now. limit: of that, the most that the pool may take.

    usual: what it takes unless one request needs more. shortage: how many bytes must become free for a limit
    of so many.
    """

    free: int
    limit: int
    usual: int
    shortage: Callable[[int], int]


def cpu_room(free: int) -> Room:
    """A quarter as a rule, and never the reserve."""
    there = max(free, 0)
    return Room(there, there - reserve(there), there // _SHARE, lambda needed: _free_for(needed) - free)


def gpu_room(free: int, vram_reserve: int, workspace: int) -> Room:
    """All but what other programs and computing are to have: a GPU keeps nothing else that is of use."""
    left = free - vram_reserve - workspace
    limit = max(left, 0)
    return Room(free, limit, limit, lambda needed: needed - left)


def bounded(room: Room, bound: int) -> Room:
    """A room of which no more than so many bytes may be taken."""
    limit = min(room.limit, max(bound, 0))
    return Room(
        room.free, limit, min(room.usual, limit), lambda needed: max(room.shortage(needed), needed - bound)
    )


def workspace_bytes(config: EngineConfig, spec: DecoderSpec) -> int:
    """What computing takes beside weights and pool, at most: libraries, and the largest step.

    On a GPU also the partial results of attention once more, for recorded steps.
    """
    on_gpu, num_logits = config.backend == "gpu", max(config.max_num_requests, PROMPT_ROWS)
    step = step_bytes(spec, config.max_num_tokens, num_logits, on_gpu)
    if not on_gpu:
        return step + _LIBRARY_BYTES
    from quantd.kernels.gpu.attention_plan import SCRATCH_BYTES  # needs triton

    return step + SCRATCH_BYTES


def step_bytes(spec: DecoderSpec, num_rows: int, num_logits: int, on_gpu: bool) -> int:
    """What a step takes on a rank, a bound: all values counted as float32, as if the rank were alone.

    A layer's activations, logits with a copy that is adjusted and one on its way, and on a GPU the partial
    results of attention and what libraries and kernels take.
    """
    heads, fixed = spec.heads, 0
    if on_gpu:
        from quantd.kernels.gpu.attention_plan import SCRATCH_BYTES  # needs triton

        fixed = SCRATCH_BYTES + _LIBRARY_BYTES
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    activations = 4 * num_rows * (4 * spec.hidden_size + 2 * width + 3 * spec.intermediate_size)
    return activations + fixed + 3 * 4 * num_logits * spec.vocab_size


def plan_blocks(
    config: EngineConfig, max_model_len: int, block_bytes: int, room: Room, least_len: int = LEAST_LEN
) -> int:
    """Blocks of a pool: as config.kv_memory says, else what is usual, or more where one request of
    max_model_len needs it.

    Never more than max_num_requests such requests could use. The pool may be too small for one of them, with
    kv_memory given or where the length is the model's own and not asked for: longer requests are then
    refused one by one (ModelInfo.max_request_len says where). Raises CapacityError where not even least_len
    of its tokens fit.
    """
    needed = -(-max_model_len // config.block_size)
    if config.kv_memory is not None:
        return min(_explicit_blocks(config.kv_memory, block_bytes), needed * config.max_num_requests)
    free, limit, usual, shortage = room
    least = needed if config.max_model_len is not None else min(needed, least_len // config.block_size)
    if limit < least * block_bytes:
        fits = limit // block_bytes * config.block_size
        shorter = f"set max_model_len to {fits} or less, or " if fits else ""
        raise CapacityError(
            f"one request of {least * config.block_size} tokens takes {_mib(least * block_bytes)} of KV "
            f"cache, but {_mib(limit)} can be had ({_mib(free)} is free, {_mib(free - limit)} of it for "
            f"computing and other programs): {shorter}free memory, or give kv_memory yourself",
            shortage=shortage(least * block_bytes),
        )
    share = max(usual, min(needed * block_bytes, limit))
    return min(share // block_bytes, needed * config.max_num_requests)


def plan_rank_blocks(
    config: EngineConfig,
    max_model_len: int,
    ranks: Sequence[RankLoaded],
    workspace: int = 0,
    least_len: int = LEAST_LEN,
) -> int:
    """Blocks of the pool of which each rank holds a part; kv_memory is that of all ranks together.

    Else as many as every device has room for; the ranks on one device share what it has left. workspace: see
    workspace_bytes; a CPU's is in what is left to others. Raises CapacityError.
    """
    if config.kv_memory is not None:
        num_blocks = plan_blocks(config, max_model_len, sum(rank.block_bytes for rank in ranks), cpu_room(0))
        for device in devices_of(ranks):
            room = free_on(config, ranks, device) - (0 if device == "cpu" else workspace)
            _check_explicit(
                num_blocks * _block_bytes(ranks, device), min(room, _bound(config, ranks, device))
            )
        return num_blocks
    return min(
        plan_blocks(
            config,
            max_model_len,
            _block_bytes(ranks, device),
            _room_on(config, ranks, device, workspace),
            least_len,
        )
        for device in devices_of(ranks)
    )


def devices_of(ranks: Sequence[RankLoaded]) -> list[str]:
    """The devices of some ranks, each once."""
    return list(dict.fromkeys(rank.device for rank in ranks))


def free_on(config: EngineConfig, ranks: Sequence[RankLoaded], device: str) -> int:
    """What the ranks on a device may count on beside their weights."""
    free = min(rank.available for rank in ranks if rank.device == device)
    return free - config.allowance.promised if device == "cpu" else free


def _bound(config: EngineConfig, ranks: Sequence[RankLoaded], device: str) -> int:
    """What the engine's limit leaves for the pool on a device."""
    if config.allowance.limit is None:
        return sys.maxsize
    share = config.allowance.limit // len(devices_of(ranks))
    return share - sum(rank.weight_bytes for rank in ranks if rank.device == device)


def _room_on(config: EngineConfig, ranks: Sequence[RankLoaded], device: str, workspace: int) -> Room:
    free = free_on(config, ranks, device)
    room = cpu_room(free) if device == "cpu" else gpu_room(free, config.vram_reserve, workspace)
    return bounded(room, _bound(config, ranks, device))


def _block_bytes(ranks: Sequence[RankLoaded], device: str) -> int:
    return sum(rank.block_bytes for rank in ranks if rank.device == device)


def _explicit_blocks(kv_memory: int, block_bytes: int) -> int:
    if kv_memory < block_bytes:
        raise CapacityError(
            f"kv_memory is {kv_memory} bytes, but one block of the KV cache takes {block_bytes}: raise it"
        )
    return kv_memory // block_bytes


def _check_explicit(size: int, room: int) -> None:
    """Raise CapacityError where there is not the room for a pool that was asked for."""
    if size > room:
        raise CapacityError(
            f"a KV cache of {_mib(size)} was asked for, but {_mib(max(room, 0))} can be had: "
            "lower kv_memory, or free memory",
            shortage=size - room,
        )


def reserve(available: int) -> int:
    """What to leave of the free memory for everything else: a quarter, at least 1 GiB, at most half."""
    return max(available // 4, min(_MIN_RESERVE, available // 2))


def _free_for(limit: int) -> int:
    """The free memory of which so much may be taken beside the reserve."""
    return max(-(-limit * 4 // 3), min(limit + _MIN_RESERVE, 2 * limit))


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
