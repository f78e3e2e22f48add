"""What every section is given: the device, its sizes, a timer, and what the GPU's memory can deliver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from sides.report import Row

from gpu_sides.sizes import FULL, TINY, Sizes
from gpu_sides.timing import Call, CudaTimer, DryTimer, Timer
from quantd.kernels.gpu.tuning import Tuning, gpu_of

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Skipped(Exception):
    """Why a measure is not taken on this machine."""


@dataclass(frozen=True)
class Measure:
    """A line of the table that is still to be measured. run raises Skipped, or whatever a kernel raises."""

    name: str
    run: Callable[[], Row]


@dataclass(frozen=True)
class Setup:
    """dtype: of everything but what the ops have in float32."""

    device: torch.device
    sizes: Sizes
    timer: Timer
    dtype: torch.dtype

    @classmethod
    def here(cls, dtype: str, dry: bool) -> Setup:
        """The first GPU; dry: the interpreter and tiny sizes. dtype: of DTYPES."""
        torch.manual_seed(0)
        if dry:
            return cls(torch.device("cpu"), TINY, DryTimer(), DTYPES[dtype])
        return cls(torch.device("cuda", 0), FULL, CudaTimer(), DTYPES[dtype])

    @property
    def type_name(self) -> str:
        """Of dtype, and of a KV cache that holds it."""
        (name,) = (name for name, dtype in DTYPES.items() if dtype == self.dtype)
        return name

    @cached_property
    def tuning(self) -> Tuning:
        """As shipped: nothing is tuned before it is measured."""
        return Tuning(gpu_of(self.device))

    @cached_property
    def bandwidth(self) -> float:
        """Bytes a second of a large copy, read and written."""
        source = torch.ones(self.sizes.copy_bytes, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / self.timer.seconds([lambda: target.copy_(source)])

    def bits_goal(self, promised: bool = True) -> float | None:
        """How much may differ in bits."""
        return 0 if promised else None

    def calls(self, num_bytes: int, call: Callable[[], Call]) -> list[Call]:
        """Calls that touch so many bytes each: so many of them that none finds its own in a cache."""
        return [call() for _ in range(self.timer.copies(num_bytes))]

    def of_bandwidth(
        self, name: str, num_bytes: int, calls: list[Call], goal: float | None = None, note: str = ""
    ) -> Row:
        """A measure of a call that has to move so many bytes, beside the copy. goal: share of its rate."""
        seconds = self.timer.seconds(calls)
        note = f"{seconds * 1e6:.1f} µs{'; ' * bool(note)}{note}"
        rate, best = num_bytes / seconds / 1e9, self.bandwidth / 1e9
        return Row(name, "GB/s", rate, goal, best, "copy in memory", note=note)

    def need(self, num_bytes: int) -> None:
        """Raise Skipped where the GPU has less memory free, a little left over."""
        free = self.free_bytes
        if num_bytes + (1 << 30) > free:
            raise Skipped(f"takes {num_bytes / 1e9:.0f} GB, {free / 1e9:.0f} are free")

    @property
    def free_bytes(self) -> int:
        """Memory that can be had, what torch keeps for later included; without a GPU any amount."""
        if self.device.type != "cuda":
            return 1 << 40
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return torch.cuda.mem_get_info(self.device)[0] + kept


def peer_seconds(timer: Timer, calls: list[Call], recorded: bool = True) -> float | None:
    """The time of something that is not ours; None where it does not run here."""
    try:
        return timer.seconds(calls, recorded)
    except RuntimeError:
        return None
