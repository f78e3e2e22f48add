"""Every kernel as models launch it on each GPU, compiled for that GPU and read from its machine code."""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections import defaultdict
from collections.abc import Iterator

import pytest
import triton
import triton.language as tl
from compilers import compilers
from gpu_compile import (
    Report,
    all_launches,
    compile_launch,
    covering,
    faults,
    reads_code,
    wrongs,
)
from gpu_launches import Launch
from gpu_models import GPUS

import quantd.kernels.gpu
from quantd.kernels.gpu.targets import TARGETS


def kernels() -> Iterator[str]:
    """All of the package; what kernels call has other names."""
    for found in pkgutil.iter_modules(quantd.kernels.gpu.__path__, f"{quantd.kernels.gpu.__name__}."):
        names = vars(importlib.import_module(found.name))
        jitted = [(name, value.fn) for name, value in names.items() if hasattr(value, "fn")]
        own = [name for name, function in jitted if function.__module__ == found.name]
        yield from (f"{found.name}:{name}" for name in own if name.endswith("_kernel"))


@triton.jit
def square_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tile = tl.load(x + at)
    tl.store(out + at, tl.dot(tile, tile))


def square(size: int, capability: int) -> Launch:
    """The square of a matrix by one warp, which has registers for a small one only."""
    signature = (("out", "*fp32"), ("x", "*fp16"))
    return Launch(f"{__name__}:square_kernel", capability, signature, (("SIZE", size),), ("x", "out"), 1, 2)


PROBES = [square(32, 90), square(128, 90), square(32, 75)]


def test_the_code_is_read_as_it_is() -> None:
    with compilers(len(PROBES)) as pool:
        probes = [pool.submit(compile_launch, probe, True) for probe in PROBES]
        small, large, turing = (probe.result() for probe in probes)
    assert small.num_tensor_core and not turing.num_tensor_core
    assert small.num_wide_loads and small.num_registers > 16
    assert small.spilled_bytes == 0 < large.spilled_bytes
    assert 0 < small.shared_bytes < large.shared_bytes


def test_a_fault_is_found() -> None:
    launch = square(32, 75)
    good = Report(num_registers=255, spilled_bytes=0, shared_bytes=64 << 10)
    assert list(faults(launch, good)) == []
    assert list(faults(launch, good._replace(spilled_bytes=8))) == ["8 bytes of registers spilled"]
    assert list(faults(launch, good._replace(shared_bytes=65537))) == ["65537 bytes of shared memory"]


def test_a_cover_has_all_pairs_and_all_gpus() -> None:
    launches = [
        Launch("m:k", capability, (("x", type),), (("A", a), ("B", b), ("WIDTH", width)), (), 4, 3)
        for capability in (75, 90)
        for type in ("*fp16", "*bf16")
        for a in (1, 2)
        for b in (1, 2)
        for width in (16, 17, 18, 19)
    ]
    chosen = covering(launches)
    assert {launch.capability for launch in chosen} == {75, 90}
    assert len({(launch.signature, launch.constants[0]) for launch in chosen}) == 4
    assert len({launch.constants[:2] for launch in chosen}) == 4
    assert len(chosen) <= 6


def test_every_target_is_launched_on() -> None:
    assert tuple(gpu.capability for gpu in GPUS) == TARGETS


@pytest.mark.timeout(900)  # some minutes of two busy cores
def test_kernels_fit_what_they_are_launched_on() -> None:
    """One test, so that what is launched is recorded once."""
    num_processes = os.cpu_count() or 1
    launched: dict[str, list[Launch]] = defaultdict(list)
    for launch in all_launches(num_processes):
        launched[launch.kernel].append(launch)
    assert sorted(launched) == sorted(kernels())
    chosen = [launch for found in launched.values() for launch in covering(found)]
    with compilers(num_processes) as pool:
        futures = {launch: pool.submit(compile_launch, launch, reads_code(launch)) for launch in chosen}
        assert list(wrongs(futures)) == []
