"""How many blocks the KV pool gets: plain arithmetic (torch-free). Sizes in bytes, lengths in tokens."""

from __future__ import annotations

from collections.abc import Sequence
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
_LEAST_LEN = 2048  # Tokens. A context shorter than this, unless asked for, would surprise.
_LIBRARY_BYTES = 256 << 20


class Room(NamedTuple):
    """What a device has for its part of a pool. free: now. limit: of that, the most that the pool may take.

    usual: what it takes unless one request needs more.
    """

    free: int
    limit: int
    usual: int


def cpu_room(free: int) -> Room:
    """A quarter as a rule, and never the reserve."""
    return Room(free, max(free - reserve(free), 0), free // _SHARE)


def gpu_room(free: int, vram_reserve: int, workspace: int) -> Room:
    """All but what other programs and computing are to have: a GPU keeps nothing else that is of use."""
    limit = max(free - vram_reserve - workspace, 0)
    return Room(free, limit, limit)


def workspace_bytes(config: EngineConfig, spec: DecoderSpec) -> int:
    """What computing takes on a GPU beside weights and pool, at most: a bound, all values counted as float32.

    Of the largest step: a layer's activations, the partial results of attention, once more for recorded
    steps, logits with a copy that is adjusted and one on its way, and what libraries and kernels take.
    """
    from quantd.kernels.gpu.attention_plan import SCRATCH_BYTES  # needs triton

    heads, num_rows = spec.heads, config.max_num_tokens
    width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
    activations = 4 * num_rows * (4 * spec.hidden_size + 2 * width + 3 * spec.intermediate_size)
    logits = 4 * max(config.max_num_requests, PROMPT_ROWS) * spec.vocab_size
    return activations + 2 * SCRATCH_BYTES + 3 * logits + _LIBRARY_BYTES


def plan_blocks(config: EngineConfig, max_model_len: int, block_bytes: int, room: Room) -> int:
    """Blocks of a pool: as config.kv_memory says, else what is usual, or more where one request of
    max_model_len needs it.

    Never more than max_num_requests such requests could use. The pool may be too small for one of them, with
    kv_memory given or where the length is the model's own and not asked for: longer requests are then
    refused one by one (ModelInfo.max_request_len says where). Raises CapacityError where not even that is of
    use.
    """
    needed = -(-max_model_len // config.block_size)
    if config.kv_memory is not None:
        return min(_explicit_blocks(config.kv_memory, block_bytes), needed * config.max_num_requests)
    free, limit, usual = room
    least = needed if config.max_model_len is not None else min(needed, _LEAST_LEN // config.block_size)
    if limit < least * block_bytes:
        raise CapacityError(
            f"one request of {least * config.block_size} tokens takes {_mib(least * block_bytes)} of KV "
            f"cache, but {_mib(limit)} can be had ({_mib(free)} is free, {_mib(free - limit)} of it for "
            f"computing and other programs): set max_model_len to {limit // block_bytes * config.block_size} "
            "or less, or free memory, or give kv_memory yourself"
        )
    share = max(usual, min(needed * block_bytes, limit))
    return min(share // block_bytes, needed * config.max_num_requests)


def plan_rank_blocks(
    config: EngineConfig, max_model_len: int, ranks: Sequence[RankLoaded], workspace: int = 0
) -> int:
    """Blocks of the pool of which each rank holds a part; kv_memory is that of all ranks together.

    Else as many as every device has room for; the ranks on one device share what it has left. workspace: see
    workspace_bytes. Raises CapacityError.
    """
    if config.kv_memory is not None:
        return plan_blocks(config, max_model_len, sum(rank.block_bytes for rank in ranks), Room(0, 0, 0))
    devices = {rank.device: [r for r in ranks if r.device == rank.device] for rank in ranks}

    def blocks(device: str, there: Sequence[RankLoaded]) -> int:
        free = min(rank.available for rank in there)
        room = cpu_room(free) if device == "cpu" else gpu_room(free, config.vram_reserve, workspace)
        return plan_blocks(config, max_model_len, sum(rank.block_bytes for rank in there), room)

    return min(blocks(device, there) for device, there in devices.items())


def _explicit_blocks(kv_memory: int, block_bytes: int) -> int:
    if kv_memory < block_bytes:
        raise CapacityError(
            f"kv_memory is {kv_memory} bytes, but one block of the KV cache takes {block_bytes}: raise it"
        )
    return kv_memory // block_bytes


def reserve(available: int) -> int:
    """What to leave of the free memory for everything else: a quarter, at least 1 GiB, at most half."""
    return max(available // 4, min(_MIN_RESERVE, available // 2))


def _mib(size: int) -> str:
    return f"{size / (1 << 20):.0f} MiB"
