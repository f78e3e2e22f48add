"""How the layers of a model are spread over stages of ranks: plain arithmetic (torch-free).

A stage is a run of layers; its `tp` ranks share every matrix in them. Rank number = stage * tp + place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf

import msgspec

from quantd.engine.errors import RequestError

AUTO = "auto"


class World(msgspec.Struct, frozen=True):
    """All ranks of an engine. stages: for each its first layer and the one behind its last."""

    tp: int
    stages: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.tp * len(self.stages)

    def stage(self, rank: int) -> int:
        """Which stage a rank belongs to."""
        return rank // self.tp

    def place(self, rank: int) -> int:
        """A rank's place among those of its stage."""
        return rank % self.tp

    def peers(self, rank: int) -> range:
        """All ranks of a rank's stage."""
        first = self.stage(rank) * self.tp
        return range(first, first + self.tp)

    def layers(self, rank: int) -> range:
        """The layers of a rank's stage."""
        return range(*self.stages[self.stage(rank)])


def parse_split(text: str) -> tuple[float, ...] | None:
    """The shares that a split asks for, one a stage: "" is one stage, "3,1" two; None for "auto".

    Raises ValueError for anything else.
    """
    if text == AUTO:
        return None
    shares = tuple(float(part) for part in text.split(",")) if text else (1.0,)
    if not all(0 < share < inf for share in shares):
        raise ValueError(text)
    return shares


def plan_world(tp: int, split: str, num_layers: int, free: Sequence[float], ends: float) -> World:
    """The ranks that `tp` and `split` ask for.

    For "auto": free is what each stage can hold, in any unit; ends the size, in layers, of embedding and
    output matrix, which lie with the first stage. Raises RequestError for what cannot be had.
    """
    if tp < 1:
        raise RequestError(f"tp is {tp}: give the number of ranks, 1 for no tensor parallelism", "tp")
    try:
        shares = parse_split(split)
    except ValueError:
        raise RequestError(f"split is {split!r}: give auto, or shares such as 3,1", "split") from None
    counts = _layer_counts(num_layers, free, ends) if shares is None else _layer_counts(num_layers, shares, 0)
    edges = list(accumulate(counts, initial=0))
    return World(tp, tuple(pairwise(edges)))


def stage_memory(free: Sequence[int], tp: int) -> list[int]:
    """What the stages of an automatic split can hold: each rank has a device, so the least of tp counts."""
    return [min(free[i : i + tp]) for i in range(0, len(free) - tp + 1, tp)] or [1]


def ends_in_layers(num_values: int, weight_bytes: int, num_layers: int) -> float:
    """The size, in layers, of embedding and output matrix of so many values, 2 bytes each as is usual."""
    ends = min(2 * num_values, weight_bytes - 1)
    return ends * num_layers / (weight_bytes - ends)


def _layer_counts(num_layers: int, shares: Sequence[float], first_extra: float) -> list[int]:
    """Layers of each stage: one after another goes where it fills the smallest part of the share."""
    if len(shares) > num_layers:
        raise RequestError(
            f"split names {len(shares)} stages, but the model has {num_layers} layers", "split"
        )
    counts = [1] * len(shares)
    for _ in range(num_layers - len(shares)):
        filled = [
            (count + 1 + (0 if stage else first_extra)) / share
            for stage, (count, share) in enumerate(zip(counts, shares, strict=True))
        ]
        counts[filled.index(min(filled))] += 1
    return counts


def even(total: int, parts: int, unit: int = 1) -> list[range]:
    """0 .. total - 1 as runs of whole units, the first ones a unit longer; only the last unit may be short.

    There must be a unit for each part.
    """
    units = -(-total // unit)
    assert units >= parts, (total, parts, unit)
    edges = [(i * (units // parts) + min(i, units % parts)) * unit for i in range(parts + 1)]
    return [range(start, min(stop, total)) for start, stop in pairwise(edges)]
