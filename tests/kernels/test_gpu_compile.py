"""Every kernel in every configuration that is launched, compiled for all targets and read from the cubin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import triton
import triton.language as tl

from quantd.kernels.gpu.compile import (
    SHARED_MEMORY,
    TARGETS,
    Job,
    KernelSpec,
    Report,
    all_specs,
    compile_jobs,
)

# What reads whole rows or tiles from global memory, and so has to read them wide.
BULK = ("add_rms_norm", "attention", "dequantize", "glu", "rms_norm", "rope", "sampling survey")
KERNELS = {spec.name: (module, spec) for module, spec in all_specs()}


@triton.jit
def _square_kernel(x, out, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tile = tl.load(x + at)
    tl.store(out + at, tl.dot(tile, tile))


def _square(size: int) -> KernelSpec:
    """The square of a matrix by one warp, which has registers for a small one only."""
    return KernelSpec(
        f"square {size}",
        _square_kernel,
        {"x": "*fp16", "out": "*fp32"},
        {"SIZE": size},
        num_warps=1,
        divisible_16=("x", "out"),
    )


SPECS = (_square(32), _square(128))  # found by the processes that compile
PROBES = [Job(__name__, f"square {size}", target, True) for size, target in ((32, 90), (128, 90), (32, 75))]


def jobs_of(name: str) -> list[Job]:
    module, spec = KERNELS[name]
    targets = [target for target in TARGETS if target >= spec.min_capability]
    return [Job(module, name, target, reads_code(spec, target)) for target in targets]


def reads_code(spec: KernelSpec, target: int) -> bool:
    """Tensor cores are looked for on every target that has them for us; how wide loads are, on one."""
    return (spec.has_dot and target >= 80) or (spec.name.startswith(BULK) and target == 90)


@pytest.fixture(scope="module")
def reports(request: pytest.FixtureRequest) -> Iterator[dict[Job, Future[Report]]]:
    """Of the kernels that this run of the tests asks for, and of the probes."""
    params = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    jobs = [job for param in params if param for job in jobs_of(param.params["name"])]
    with compile_jobs([*PROBES, *jobs], os.cpu_count() or 1) as futures:
        yield futures


def test_the_code_is_read_as_it_is(reports: dict[Job, Future[Report]]) -> None:
    small, large, turing = (reports[job].result() for job in PROBES)
    assert small.num_tensor_core and not turing.num_tensor_core
    assert small.num_wide_loads and small.num_registers > 16
    assert small.spilled_bytes == 0 < large.spilled_bytes
    assert 0 < small.shared_bytes < large.shared_bytes


def test_names_are_unique() -> None:
    assert len(KERNELS) == len(list(all_specs())) > 0


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_fits_its_targets(name: str, reports: dict[Job, Future[Report]]) -> None:
    for job in jobs_of(name):
        report = reports[job].result()
        where = f"{name} on sm_{job.capability}: {report}"
        assert report.spilled_bytes == 0, where
        assert report.shared_bytes <= SHARED_MEMORY[job.capability], where
        if KERNELS[name][1].has_dot:
            assert report.num_tensor_core != 0, where
        if name.startswith(BULK):
            assert report.num_wide_loads != 0, where
