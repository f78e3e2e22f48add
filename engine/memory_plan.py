"""What a load takes and what there is, as a table for people and programs (torch-free). Sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from quantd.engine.config import EngineConfig
from quantd.engine.errors import CapacityError
from quantd.engine.memory import LEAST_LEN, devices_of, free_on, plan_rank_blocks, reserve
from quantd.engine.rank_messages import RankLoaded


class DeviceMemory(msgspec.Struct, frozen=True, kw_only=True):
    """A device before the load. free: beside what is promised to other engines, which on a GPU is nothing.

    reserved: left to other programs.
    """

    device: str
    free: int
    promised: int
    weight_bytes: int
    workspace: int
    reserved: int


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True, tag="plan"):
    """A load. num_blocks: of the KV cache, 0 where it cannot be; then `fault` says why.

    shortage: bytes that are wanting then. limit: of all that the model takes (see Allowance).
    """

    backend: str
    kv_dtype: str
    weight_bytes: int
    block_bytes: int
    block_size: int
    max_model_len: int
    num_blocks: int
    devices: list[DeviceMemory]
    limit: int | None = None
    fault: str | None = None
    shortage: int = 0

    @property
    def kv_tokens(self) -> int:
        """Tokens that the KV cache holds."""
        return self.num_blocks * self.block_size

    @property
    def kv_bytes(self) -> int:
        """Of the whole KV cache."""
        return self.num_blocks * self.block_bytes

    def kv_bytes_of(self, num_tokens: int) -> int:
        """What so many tokens of one request take."""
        return -(-num_tokens // self.block_size) * self.block_bytes

    @property
    def table(self) -> list[tuple[str, str]]:
        """The lines for people."""
        lines = [
            ("weights", size_text(self.weight_bytes)),
            (
                "KV a 1000 tokens",
                f"{size_text(1000 * self.block_bytes // self.block_size)} ({self.kv_dtype})",
            ),
        ]
        for device in self.devices:
            where = f" {device.device}" if len(self.devices) > 1 else ""
            promised = f", beside {size_text(device.promised)} of other models" if device.promised else ""
            lines += [
                (f"workspace{where}", size_text(device.workspace)),
                (f"left to others{where}", size_text(device.reserved)),
                (f"free{where}", f"{size_text(device.free)} on {device.device}{promised}"),
            ]
        if self.limit is not None:
            lines.append(("limit", f"{size_text(self.limit)} (max_memory, less other models)"))
        cache = f"{self.kv_tokens} tokens ({size_text(self.kv_bytes)})"
        lines.append(("wanting", size_text(self.shortage)) if self.fault else ("KV cache", cache))
        return lines

    def refusal(self, urgent: bool = True) -> CapacityError | None:
        """The error, with the table, where the load cannot be."""
        if self.fault is None:
            return None
        # A limit is on the memory of all devices together.
        on_gpu = None if self.limit is not None else self.devices[0].device != "cpu"
        return CapacityError(f"{self.fault}\n{lines_of(self.table)}", self.shortage, urgent, on_gpu)


def plan_memory(
    config: EngineConfig,
    backend: str,
    max_model_len: int,
    ranks: Sequence[RankLoaded],
    workspace: int = 0,
    least_len: int = LEAST_LEN,
) -> MemoryPlan:
    """The plan for ranks that are loaded, or as they will be.

    workspace: see workspace_bytes. least_len: tokens that must fit, if the model has as many.
    """
    num_blocks, fault, shortage = 0, None, 0
    try:
        num_blocks = plan_rank_blocks(config, max_model_len, ranks, workspace, least_len)
    except CapacityError as error:
        fault, shortage = str(error), error.shortage
    return MemoryPlan(
        backend=backend,
        kv_dtype=config.kv_dtype,
        weight_bytes=sum(rank.weight_bytes for rank in ranks),
        block_bytes=sum(rank.block_bytes for rank in ranks),
        block_size=config.block_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        devices=[_device(config, ranks, device, workspace) for device in devices_of(ranks)],
        limit=config.allowance.limit,
        fault=fault,
        shortage=shortage,
    )


def _device(config: EngineConfig, ranks: Sequence[RankLoaded], device: str, workspace: int) -> DeviceMemory:
    weights, left = sum(r.weight_bytes for r in ranks if r.device == device), free_on(config, ranks, device)
    on_cpu = device == "cpu"
    return DeviceMemory(
        device=device,
        free=left + weights,
        promised=config.allowance.promised if on_cpu else 0,
        weight_bytes=weights,
        workspace=workspace,
        reserved=reserve(max(left, 0)) if on_cpu else config.vram_reserve,
    )


def lines_of(table: Sequence[tuple[str, str]]) -> str:
    """A table as it is printed."""
    return "\n".join(f"  {name:<18} {text}" for name, text in table)


def size_text(num_bytes: int) -> str:
    """A size for people, in powers of 1000."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"
