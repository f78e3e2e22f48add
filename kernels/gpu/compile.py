"""Compiling kernels where there is no GPU, and reading from the machine code what became of them.

Each kernel module names its kernels, and all that they are launched with, in `SPECS`. Triton comes with
the whole tool chain of every target, so what a GPU would run can be looked at anywhere.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

import quantd.kernels.gpu

# Bytes of shared memory that one program may have (CUDA programming guide, compute capabilities).
SHARED_MEMORY = {
    75: 64 << 10,
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    120: 99 << 10,
}
TARGETS = tuple(SHARED_MEMORY)
FIRST_DOT = 80
"""Lowest compute capability with tensor-core products from Triton."""

_TENSOR_CORE = re.compile(r"\b(?:[HIQO]MMA|[HIQ]GMMA|UTC\w*MMA)\b")
_WIDE_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.\S*\b(?:128|256)\b")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


@dataclass(frozen=True)
class KernelSpec:
    """A kernel in one configuration that is launched.

    name: unique, such as "attention int8 d128". kernel: the @triton.jit function. signature: type of each
    argument that is no constant, "*fp16", "*i8", "*fp32", "*i32", "i32", "fp32". constants: values of the
    constexpr ones. has_dot: must show tensor-core instructions from sm_80 up. min_capability: the lowest
    target it is launched on, 75 for sm_75. divisible_16: arguments known to be multiples of 16
    (pointers: aligned to 16 bytes).
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, object]
    num_warps: int = 4
    num_stages: int = 2
    has_dot: bool = False
    min_capability: int = 75
    divisible_16: tuple[str, ...] = ()


class Report(NamedTuple):
    """What a kernel became on one target.

    num_registers: of a thread. spilled_bytes: of a thread's stack, where what found no register lies.
    shared_bytes: of a program. num_tensor_core, num_wide_loads: instructions for matrices, and loads of 16
    bytes or more from global memory, as they stand in the code; None where the code was not read.
    """

    num_registers: int
    spilled_bytes: int
    shared_bytes: int
    num_tensor_core: int | None = None
    num_wide_loads: int | None = None


class Job(NamedTuple):
    """A spec, by the module that has it and its name, and a target; see compile_spec."""

    module: str
    name: str
    capability: int
    reads_code: bool


def all_specs() -> Iterator[tuple[str, KernelSpec]]:
    """Every spec of this package, with the module that has it."""
    for found in pkgutil.iter_modules(quantd.kernels.gpu.__path__, f"{quantd.kernels.gpu.__name__}."):
        module = importlib.import_module(found.name)
        yield from ((found.name, spec) for spec in getattr(module, "SPECS", ()))


def compile_spec(spec: KernelSpec, capability: int, reads_code: bool) -> Report:
    """Compile for sm_`capability`; reads_code: count instructions, which takes as long as compiling.

    Not for a process in which Triton interprets: see compile_jobs.
    """
    # After the environment is settled: triton reads it when it is imported.
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = spec.kernel.arg_names
    unknown = (spec.signature.keys() | spec.constants.keys()).symmetric_difference(names)
    assert not unknown, f"{spec.name}: {sorted(unknown)} are not both arguments and told of"
    source = ASTSource(
        spec.kernel,
        {name: spec.signature.get(name, "constexpr") for name in names},
        dict(spec.constants),
        {(names.index(name),): [["tt.divisibility", 16]] for name in spec.divisible_16},
    )
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return _report(compiled.asm["cubin"], compiled.metadata.shared, reads_code)


@contextmanager
def compile_jobs(jobs: Iterable[Job], num_processes: int) -> Iterator[dict[Job, Future[Report]]]:
    """Compile in processes of their own, in which Triton does not interpret; leaving drops what waits.

    A future gives the report, or raises the error of a kernel that does not compile.
    """
    # Processes are started afresh, not forked: a fork has triton imported already.
    pool = ProcessPoolExecutor(num_processes, get_context("spawn"), _stop_interpreting)
    try:
        yield {job: pool.submit(_compile_job, job) for job in jobs}
    finally:
        pool.shutdown(cancel_futures=True)


def _stop_interpreting() -> None:
    os.environ["TRITON_INTERPRET"] = "0"


def _compile_job(job: Job) -> Report:
    (spec,) = (spec for spec in importlib.import_module(job.module).SPECS if spec.name == job.name)
    return compile_spec(spec, job.capability, job.reads_code)


def _report(cubin: bytes, shared_bytes: int, reads_code: bool) -> Report:
    from triton import knobs

    usage = _USAGE.search(_told(knobs.nvidia.cuobjdump.path, "-res-usage", cubin))
    assert usage is not None, "cuobjdump tells of no kernel"
    registers, stack, local = map(int, usage.groups())
    report = Report(registers, stack + local, shared_bytes)
    if not reads_code:
        return report
    code = _told(knobs.nvidia.nvdisasm.path, "-c", cubin)
    return report._replace(
        num_tensor_core=len(_TENSOR_CORE.findall(code)), num_wide_loads=len(_WIDE_LOAD.findall(code))
    )


def _told(tool: str, option: str, cubin: bytes) -> str:
    """What one of the tools that come with triton tells of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
