"""How products are launched: shipped defaults, and what was measured on a GPU instead, kept in a file.

A plan has one number of splits for any number of rows, and a tile for each class of rows: tiles change no
bit of a result, splits do. Nothing is ever measured but where `search` is called.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from quantd.kernels.gpu.targets import FIRST_DOT, SHARED_MEMORY

logger = logging.getLogger(__name__)

ROW_CLASSES = (16, 32, 64)
"""A step's rows count as the smallest of these that holds them; more than the last as the last."""

_VERSION = 1
_BLOCKS_N = (64, 128)
_WARPS = (4, 8)
_STAGES = (2, 3, 4, 5, 6)
_SM_REGISTERS = 65536
_MIN_SPLIT_K = 512  # inputs of a split: enough to fill the pipeline


@dataclass(frozen=True)
class Gpu:
    """What launches depend on. capability: 89 for sm_89."""

    name: str
    capability: int
    num_sms: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory that one program may have; as on the next older GPU where this one is not known."""
        known = [capability for capability in SHARED_MEMORY if capability <= self.capability]
        return SHARED_MEMORY[max(known, default=75)]

    @property
    def has_dots(self) -> bool:
        """Whether Triton has tensor-core products for it."""
        return self.capability >= FIRST_DOT


INTERPRETED = Gpu("interpreter", 90, 132)
"""What the interpreter stands for."""


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The GPU of a device; of a CPU, on which only the interpreter runs kernels, a made-up one."""
    if device.type != "cuda":
        return INTERPRETED
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.name, 10 * properties.major + properties.minor, properties.multi_processor_count)


@dataclass(frozen=True)
class Shape:
    """A product of N outputs and K inputs (padded) of `input_bits`, weights of `bits`, K in blocks."""

    n: int
    k: int
    bits: int
    block_k: int
    input_bits: int

    @property
    def blocks_per_step(self) -> int:
        """Blocks that a program goes through at a time; all of a step's loads are under way together.

        The same for any number of rows, since splits are whole steps.
        """
        # Plain weights are as many bytes in half the inputs; two planes are twice the loads.
        step_k = 128 if self.bits in (1, 2, 4, 8) else 64
        most = max(step_k // self.block_k, 1)
        return next(blocks for blocks in (8, 4, 2, 1) if blocks <= most and self.num_blocks % blocks == 0)

    @property
    def has_two_planes(self) -> bool:
        """Whether a code's bits lie in two places: see quantd.kernels.gpu.weights."""
        return self.bits < 8 and self.bits not in (1, 2, 4)

    @property
    def num_blocks(self) -> int:
        """Blocks of inputs."""
        return self.k // self.block_k


@dataclass(frozen=True)
class Tile:
    """What a program computes, block_m rows by block_n outputs, and with what.

    block_n is a multiple of 64 and num_warps of 4, so that sm_90 takes the same tensor-core instruction
    for every tile, and a row gets the same bits from each.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        """Raise ValueError for what the kernels do not take; a file may say anything."""
        allowed = {"block_m": ROW_CLASSES, "block_n": _BLOCKS_N, "num_warps": _WARPS, "num_stages": _STAGES}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name} is {getattr(self, name)!r}, not one of {values}")


@dataclass(frozen=True)
class Plan:
    """splits: parts that the inputs are cut into, added up in order. tiles: one a class of rows."""

    splits: int
    tiles: Mapping[int, Tile]

    def __post_init__(self) -> None:
        """Raise ValueError where a class of rows has no tile."""
        if not isinstance(self.splits, int) or self.splits < 1 or set(self.tiles) != set(ROW_CLASSES):
            raise ValueError(f"{self.splits!r} splits and tiles for {sorted(self.tiles)} rows")

    def tile(self, num_rows: int) -> Tile:
        """The tile for a step of `num_rows` rows."""
        return self.tiles[row_class(num_rows)]


def row_class(num_rows: int) -> int:
    """The class of a step of `num_rows` rows."""
    return next((rows for rows in ROW_CLASSES if rows >= num_rows), ROW_CLASSES[-1])


@cache
def default_plan(shape: Shape, gpu: Gpu) -> Plan:
    """The shipped plan: a pure function of shape and GPU."""
    tiles = {rows: default_tile(rows, shape, gpu) for rows in ROW_CLASSES}
    return Plan(default_splits(shape, gpu), tiles)


def default_splits(shape: Shape, gpu: Gpu) -> int:
    """As many, a power of two, as keep three programs an SM busy where rows are few."""
    programs = -(-shape.n // 128)
    most = min(3 * gpu.num_sms // programs, shape.k // _MIN_SPLIT_K)
    return 1 << max(most.bit_length() - 1, 0)


def default_tile(rows: int, shape: Shape, gpu: Gpu) -> Tile:
    """As many rows as weights are unpacked once for, and as deep a pipeline as shared memory has room for."""
    # Beyond 32 rows the older instruction (all but sm_90's) has two warps unpack the same weights.
    block_m = min(rows, 64 if gpu.capability == 90 else 32)
    # Eight warps load scales to where they are used; four, which pass them on, unpack more per instruction.
    unpacks_much = rows <= 16 and shape.block_k == 128
    # Two planes leave eight warps of sm_120 short of registers, four have twice as many each.
    lacks_registers = gpu.capability == 120 and block_m == 32 and shape.has_two_planes
    num_warps = 4 if unpacks_much or lacks_registers else 8
    return Tile(block_m, 128, num_warps, _num_stages(block_m, 128, shape, gpu))


def max_registers(tile: Tile, shape: Shape, gpu: Gpu) -> int | None:
    """Registers that a thread of a product may have; None for as many as the assembler finds best.

    For sm_120 it keeps a few words of some tiles in memory, to have room for a third program on an SM. Those
    get the registers of two, which they leave part of unused.
    """
    is_traded = gpu.capability == 120 and tile.block_m == 32 and (shape.bits == 8 or shape.has_two_planes)
    return min(_SM_REGISTERS // (2 * 32 * tile.num_warps), 255) if is_traded else None


def _num_stages(block_m: int, block_n: int, shape: Shape, gpu: Gpu) -> int:
    """Stages of the pipeline: as many as fit, and fewer where there is more to compute than to wait for.

    Fast memory wants about 40 KB under way for each processor, whose two programs have 8 KB a stage each.
    """
    step_k = shape.block_k * shape.blocks_per_step
    weight_bytes, input_bytes = (
        rows * step_k * bits // 8 for rows, bits in ((block_n, shape.bits), (block_m, shape.input_bits))
    )
    # Two programs share an SM where rows are few.
    room = gpu.shared_bytes // (2 if block_m <= 32 else 1) - 2048
    # One buffer less than stages, but for inputs on sm_90, which products read from shared memory.
    if gpu.capability == 90:
        room -= input_bytes
    fits = room // (weight_bytes + input_bytes) + 1
    return min(max(fits, _STAGES[0]), _STAGES[-1] if block_m <= 16 else 3)


@dataclass(frozen=True)
class Tuning:
    """Plans of a GPU: measured ones where there are any, else the shipped ones."""

    gpu: Gpu
    measured: Mapping[Shape, Plan] = field(default_factory=dict)

    @property
    def splits(self) -> str:
        """What of the measurements bits hang on: the same text for the same splits."""
        return " ".join(sorted(f"{shape}={plan.splits}" for shape, plan in self.measured.items()))

    def plan(self, shape: Shape) -> Plan:
        """The plan for a product."""
        measured = self.measured.get(shape)
        return default_plan(shape, self.gpu) if measured is None else measured


def search(shape: Shape, gpu: Gpu, measure: Callable[[int, int, Tile], float]) -> Plan:
    """The fastest plan for `shape` by `measure`(rows, splits, tile): a time, Inf where that cannot run.

    Splits are chosen by the times of 1 and 16 rows; then a tile for each class of rows, first its size and
    then its stages: every launch is compiled first, so few are tried.
    """
    shipped = default_plan(shape, gpu)
    splits = min(
        _split_candidates(shape),
        key=lambda splits: sum(measure(rows, splits, shipped.tile(rows)) for rows in (1, 16)),
    )
    tiles = {}
    for rows in ROW_CLASSES:
        time = partial(measure, rows, splits)
        sized = min(_sized_tiles(rows, shape, gpu), key=time)
        tiles[rows] = min((replace(sized, num_stages=stages) for stages in _STAGES), key=time)
    return Plan(splits, tiles)


def _split_candidates(shape: Shape) -> list[int]:
    return [splits for splits in (1, 2, 3, 4, 6, 8, 12, 16) if splits == 1 or splits * 256 <= shape.k]


def _sized_tiles(rows: int, shape: Shape, gpu: Gpu) -> Iterator[Tile]:
    """Of every size, with as many stages as are shipped."""
    blocks_m = [block_m for block_m in ROW_CLASSES if rows // 2 <= block_m <= rows]
    for block_m, block_n, num_warps in product(blocks_m, _BLOCKS_N, _WARPS):
        yield Tile(block_m, block_n, num_warps, _num_stages(block_m, block_n, shape, gpu))


def tuning_path(folder: Path, gpu: Gpu) -> Path:
    """The file of a GPU's measured plans."""
    return folder / f"{re.sub('[^a-z0-9]+', '-', gpu.name.lower())}.json"


def load_tuning(folder: Path, gpu: Gpu) -> Tuning:
    """Shipped plans, and measured ones from `folder` if there are any; a damaged file is logged, not used."""
    path = tuning_path(folder, gpu)
    try:
        return Tuning(gpu, _parse(json.loads(path.read_bytes())))
    except FileNotFoundError:
        return Tuning(gpu)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning(
            "%s cannot be used (%s): kernels run as shipped; delete the file or tune again", path, error
        )
        return Tuning(gpu)


def save_tuning(folder: Path, tuning: Tuning) -> Path:
    """Write the measured plans as a whole or not at all; returns the file. Raises OSError."""
    path = tuning_path(folder, tuning.gpu)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".tmp", delete=False) as file:
        json.dump(_record(tuning), file, indent=1)
    Path(file.name).replace(path)
    return path


def with_plan(tuning: Tuning, shape: Shape, plan: Plan) -> Tuning:
    """`tuning` and one more measured plan."""
    return replace(tuning, measured={**tuning.measured, shape: plan})


def _record(tuning: Tuning) -> dict[str, Any]:
    plans = [
        {
            "shape": asdict(shape),
            "splits": plan.splits,
            "tiles": {rows: asdict(tile) for rows, tile in plan.tiles.items()},
        }
        for shape, plan in tuning.measured.items()
    ]
    return {"version": _VERSION, "gpu": tuning.gpu.name, "plans": plans}


def _parse(record: Any) -> dict[Shape, Plan]:
    if record["version"] != _VERSION:
        raise ValueError(f"version {record['version']!r}")
    return {
        Shape(**entry["shape"]): Plan(
            entry["splits"], {int(rows): Tile(**tile) for rows, tile in entry["tiles"].items()}
        )
        for entry in record["plans"]
    }
