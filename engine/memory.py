"""How many blocks the KV pool gets: plain arithmetic (torch-free). Sizes in bytes, lengths in tokens."""

from __future__ import annotations

from quantd.engine.config import EngineConfig
from quantd.engine.errors import CapacityError

_MIN_RESERVE = 1 << 30


def plan_blocks(config: EngineConfig, max_model_len: int, block_bytes: int, available: int) -> int:
    """Blocks of a pool: as config.kv_memory says, else what is free, less a reserve.

    Never more than max_num_requests requests of max_model_len could use. With kv_memory given the pool
    may be too small for one of those: longer requests are then refused one by one.
    Raises CapacityError where not even one block fits, or, without kv_memory, not one such request.
    """
    needed = -(-max_model_len // config.block_size)
    if config.kv_memory is not None:
        return min(_explicit_blocks(config.kv_memory, block_bytes), needed * config.max_num_requests)
    budget = available - reserve(available)
    num_blocks = max(budget // block_bytes, 0)
    if num_blocks < needed:
        raise CapacityError(
            f"one request of {max_model_len} tokens takes {_mib(needed * block_bytes)} of KV cache, but "
            f"{_mib(budget)} can be had ({_mib(available)} is free): lower max_model_len to "
            f"{num_blocks * config.block_size} or less, or free memory, or give kv_memory yourself"
        )
    return min(num_blocks, needed * config.max_num_requests)


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
