"""Matrix products: few rows against what reading the weights takes, many rows against cuBLAS in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from sides.report import Row

from gpu_sides.setup import Measure, Setup, peer_seconds
from gpu_sides.timing import Call
from quantd.kernels.gpu.linear import linear
from quantd.kernels.gpu.weights import GpuWeight, pack
from quantd.kernels.weights import QuantizedWeight

GOAL = 0.6
_FEW_ROWS = 64  # up to which reading weights is what takes the time


def products(setup: Setup) -> Iterator[Measure]:
    """The goal's matrix first, then other widths of codes, then the matrices of the models."""
    sizes, square = setup.sizes, (setup.sizes.square, setup.sizes.square)
    for rows in sizes.rows:
        yield _measure(setup, "W4A16", square, rows, 4, has_goal=rows <= sizes.goal_rows)
    for rows in (rows for rows in sizes.rows if rows > _FEW_ROWS):
        yield _measure(setup, "W4A16, same bits", square, rows, 4, same_bits=True)
    for bits, label in ((2, "W2A16"), (3, "W3A16"), (8, "W8A16")):
        yield _measure(setup, label, square, 1, bits)
    for rows in (1, sizes.rows[-1]):
        yield _measure(setup, "W8A8", square, rows, 8, input_bits=8)
    for model in (sizes.small, sizes.large):
        for name, matrix in model.matrices.items():
            yield _measure(setup, f"W4A16, {name} of {model.name}", matrix, 1, 4)


def _measure(
    setup: Setup,
    label: str,
    size: tuple[int, int],
    rows: int,
    bits: int,
    has_goal: bool = False,
    same_bits: bool = False,
    input_bits: int | None = None,
) -> Measure:
    n, k = size
    name = f"{label}, {n} x {k}, {rows} rows"
    weight = partial(random_weight, setup, n, k, bits, input_bits)
    if rows > _FEW_ROWS:
        return Measure(name, lambda: _many_rows(setup, name, weight(), rows, same_bits))
    return Measure(name, lambda: _few_rows(setup, name, weight, rows, GOAL if has_goal else None))


def random_weight(setup: Setup, n: int, k: int, bits: int, input_bits: int | None = None) -> GpuWeight:
    """Symmetric in groups of 128, or for INT8 inputs a scale for each output; made and packed on the GPU."""
    group = k if input_bits else min(128, k)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, device=setup.device)
    scale = torch.full((n, k // group), 0.09 / 2**bits, device=setup.device)
    weight = QuantizedWeight(codes, scale, -(2 ** (bits - 1)) * scale, bits, group, None, input_bits)
    return pack(weight, None, setup.device, setup.dtype)


def _few_rows(setup: Setup, name: str, weight: partial[GpuWeight], rows: int, goal: float | None) -> Row:
    first = weight()
    (n, k), num_copies = first.shape, setup.timer.copies(first.nbytes)
    packed = [first, *(weight() for _ in range(num_copies - 1))]
    x = torch.randn(rows, k, device=setup.device, dtype=setup.dtype)
    calls: list[Call] = [partial(linear, x, one, setup.tuning) for one in packed]
    num_bytes = first.nbytes + 2 * rows * (n + k)
    return setup.of_bandwidth(name, num_bytes, calls, goal, _vendor_note(setup, x, n))


def _vendor_note(setup: Setup, x: torch.Tensor, n: int) -> str:
    plain = [
        torch.randn(n, x.shape[1], device=setup.device, dtype=setup.dtype)
        for _ in range(setup.timer.copies(2 * n * x.shape[1]))
    ]
    seconds = peer_seconds(setup.timer, [partial(torch.matmul, x, one.T) for one in plain])
    return "" if seconds is None else f"cuBLAS {setup.type_name} {seconds * 1e6:.1f} µs"


def _many_rows(setup: Setup, name: str, weight: GpuWeight, rows: int, same_bits: bool) -> Row:
    n, k = weight.shape
    x = torch.randn(rows, k, device=setup.device, dtype=setup.dtype)
    plain = torch.randn(n, k, device=setup.device, dtype=setup.dtype)
    ours = setup.timer.seconds([partial(linear, x, weight, setup.tuning, same_bits)])
    theirs = peer_seconds(setup.timer, [partial(torch.matmul, x, plain.T)])
    work = 2 * rows * n * k / 1e12
    return Row(
        name,
        "TFLOP/s",
        work / ours,
        None,
        theirs and work / theirs,
        f"cuBLAS {setup.type_name}",
        note=f"{ours * 1e6:.0f} µs",
    )
