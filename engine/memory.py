"""How many blocks the KV pool gets: plain arithmetic (torch-free). Sizes in bytes, lengths in tokens."""

from __future__ import annotations

from quantd.engine.config import EngineConfig
from quantd.engine.errors import CapacityError

_MIN_RESERVE = 1 << 30
# A desktop has other uses for its memory than old prefixes: a model takes one part in so many of what is free.
_SHARE = 4


def plan_blocks(config: EngineConfig, max_model_len: int, block_bytes: int, available: int) -> int:
    """Blocks of a pool: as config.kv_memory says, else a share of what is free.

    The share is a quarter of what is free, or one request of max_model_len where that is more; a reserve
    for everything else is never touched. Never more than max_num_requests such requests could use. With
    kv_memory given the pool may be too small for one of them: longer requests are then refused one by one.
    Raises CapacityError where not even one block fits, or, without kv_memory, not one such request.
    """
    needed = -(-max_model_len // config.block_size)
    if config.kv_memory is not None:
        return min(_explicit_blocks(config.kv_memory, block_bytes), needed * config.max_num_requests)
    limit = available - reserve(available)
    if limit < needed * block_bytes:
        fitting = max(limit // block_bytes, 0) * config.block_size
        raise CapacityError(
            f"one request of {max_model_len} tokens takes {_mib(needed * block_bytes)} of KV cache, but "
            f"{_mib(limit)} can be had ({_mib(available)} is free): lower max_model_len to "
            f"{fitting} or less, or free memory, or give kv_memory yourself"
        )
    share = max(available // _SHARE // block_bytes, needed)
    return min(share, needed * config.max_num_requests)


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
