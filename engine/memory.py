"""How many blocks the KV pool gets: plain arithmetic (torch-free). Sizes in bytes, lengths in tokens."""

from __future__ import annotations

from collections.abc import Sequence

from quantd.engine.config import EngineConfig
from quantd.engine.errors import CapacityError
from quantd.engine.rank_messages import RankLoaded

_MIN_RESERVE = 1 << 30
_SHARE = 4  # A desktop has other uses for its memory than old prefixes: one part in so many of what is free.
_LEAST_LEN = 2048  # Tokens. A context shorter than this, unless asked for, would surprise.


def plan_blocks(config: EngineConfig, max_model_len: int, block_bytes: int, available: int) -> int:
    """Blocks of a pool: as config.kv_memory says, else a share of what is free.

    The share is a quarter of what is free, or one request of max_model_len where that is more; a reserve
    for everything else is never touched. Never more than max_num_requests such requests could use. The
    pool may be too small for one of them, with kv_memory given or where the length is the model's own and
    not asked for: longer requests are then refused one by one (ModelInfo.max_request_len says where).
    Raises CapacityError where not even that is of use.
    """
    needed = -(-max_model_len // config.block_size)
    if config.kv_memory is not None:
        return min(_explicit_blocks(config.kv_memory, block_bytes), needed * config.max_num_requests)
    limit = max(available - reserve(available), 0)
    least = needed if config.max_model_len is not None else min(needed, _LEAST_LEN // config.block_size)
    if limit < least * block_bytes:
        raise CapacityError(
            f"one request of {least * config.block_size} tokens takes {_mib(least * block_bytes)} of KV "
            f"cache, but {_mib(limit)} can be had ({_mib(available)} is free): set max_model_len to "
            f"{limit // block_bytes * config.block_size} or less, or free memory, or give kv_memory yourself"
        )
    share = max(available // _SHARE, min(needed * block_bytes, limit))
    return min(share // block_bytes, needed * config.max_num_requests)


def plan_rank_blocks(config: EngineConfig, max_model_len: int, ranks: Sequence[RankLoaded]) -> int:
    """Blocks of the pool of which each rank holds a part; kv_memory is that of all ranks together.

    Else as many as every device has room for; the ranks on one device share what it has left. Raises
    CapacityError.
    """
    if config.kv_memory is not None:
        return plan_blocks(config, max_model_len, sum(rank.block_bytes for rank in ranks), 0)
    devices = {rank.device: [r for r in ranks if r.device == rank.device] for rank in ranks}
    return min(
        plan_blocks(config, max_model_len, sum(r.block_bytes for r in there), min(r.available for r in there))
        for there in devices.values()
    )


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
