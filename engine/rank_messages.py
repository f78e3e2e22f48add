"""The frames between rank 0 of an engine and its other ranks (torch-free); see quantd.engine.connection.

StartRank, then RankLoaded; Allocate, then RankReady; then Steps, which are not answered (what ranks compute
together passes through their groups), before large ones Reserve, then Reserved, and in idle time Prepare,
then Prepared. Failed may come at any time.
"""

from __future__ import annotations

import msgspec

from quantd.engine.config import EngineConfig
from quantd.engine.messages import Failed
from quantd.engine.split import World


class StartRank(msgspec.Struct, frozen=True, tag="start"):
    """Rank 0 -> rank: load your part. store: path of the file in which ranks find each other."""

    config: EngineConfig
    world: World
    rank: int
    store: str


class RankLoaded(msgspec.Struct, frozen=True, kw_only=True, tag="loaded"):
    """Rank -> rank 0: its weights are in memory. All sizes in bytes.

    device: where; ranks may share one. available: what it has left. block_bytes: what a block of the KV
    pool takes there.
    """

    device: str
    weight_bytes: int
    block_bytes: int
    available: int


class Allocate(msgspec.Struct, frozen=True, tag="allocate"):
    """Rank 0 -> rank: make a pool of so many blocks, and check the first forward."""

    num_blocks: int


class RankReady(msgspec.Struct, frozen=True, tag="ready"):
    """Rank -> rank 0: the first forward was sound."""


class Step(msgspec.Struct, frozen=True, kw_only=True, tag="step"):
    """Rank 0 -> rank: compute this batch (see quantd.engine.batch). Each field the bytes of int32."""

    token_ids: bytearray
    positions: bytearray
    slots: bytearray
    query_start: bytearray
    context_len: bytearray
    block_tables: bytearray
    prompt_rows: bytearray
    sample_rows: bytearray


class Prepare(msgspec.Struct, frozen=True, tag="prepare"):
    """Rank 0 -> rank: do a part of what makes later steps faster (see Runner)."""


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """Rank -> rank 0: that is done; whether more is left."""

    more: bool


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """Rank 0 -> rank: see that you have so many bytes for the next step, beside weights and pool."""

    num_bytes: int


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """Rank -> rank 0: why it has not, None where it has."""

    shortage: str | None


ToRank = StartRank | Allocate | Step | Prepare | Reserve
FromRank = RankLoaded | RankReady | Prepared | Reserved | Failed
