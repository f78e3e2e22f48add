"""Kernels compiled where there is no GPU, and what their machine code tells of them.

Triton comes with the whole tool chain of every target. `python tests/kernels/gpu_compile.py` compiles every
kind of launch, which takes an hour or so of a core's time; the tests compile what `covering` chooses.
"""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache
from itertools import combinations
from typing import NamedTuple

from compilers import compilers
from gpu_launches import Launch, Recorder
from gpu_models import MODELS

from quantd.kernels.gpu.targets import FIRST_DOT, SHARED_MEMORY

# What reads whole rows or tiles from global memory, and so has to read them wide.
_BULK = (
    "_dense_gemv_kernel",
    "_glu_kernel",
    "_norm_kernel",
    "_rope_kernel",
    "attention_kernel",
    "survey_kernel",
)
_DOT = ("_matmul_kernel", "attention_kernel")
# What multiplies in float32, a thread what it has loaded.
_GEMV = ("_gemv_kernel", "_dense_gemv_kernel")
# Constants of which a kernel's code has no more than a number, and those that matter in being none or one.
_SIZES = ("VOCAB", "CHUNKS", "SLOTS", "WIDTH", "NUM_HEADS", "NUM_KV_HEADS", "GROUP", "HEAD_STRIDE")
_COUNTS = ("WORDS", "SPLITS")

_TENSOR_CORE = re.compile(r"\b(?:[HIQO]MMA|[HIQ]GMMA|UTC\w*MMA)\b")
_FMA = re.compile(r"\bFFMA\b")
_WIDE_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.\S*\b(?:128|256)\b")
_USAGE = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")


class Report(NamedTuple):
    """What a kernel became on one target.

    num_registers: of a thread. spilled_bytes: of a thread's stack, where what found no register lies.
    shared_bytes: of a program. num_tensor_core, num_wide_loads, num_fma: instructions for matrices, loads of
    16 bytes or more from global memory, and sums with a product in float32, as they stand in the code; None
    where the code was not read.
    """

    num_registers: int
    spilled_bytes: int
    shared_bytes: int
    num_tensor_core: int | None = None
    num_wide_loads: int | None = None
    num_fma: int | None = None


def kinds(launches: Iterable[Launch]) -> list[Launch]:
    """One of those that differ in nothing but sizes, which change no more than a number in the code."""
    there = sorted(launches, key=str)
    found = {
        (launch.kernel, launch.capability, *_values(launch), launch.divisible): launch for launch in there
    }
    return list(found.values())


def covering(launches: Iterable[Launch]) -> list[Launch]:
    """So few of one kernel's launches that any two values of its arguments that meet anywhere meet in one.

    Of sizes any will do; and each GPU has one at least.
    """
    there = sorted(launches, key=str)
    features = [_pairs(launch) for launch in there]
    left, chosen = set[Hashable]().union(*features), []
    while left:
        best = max(range(len(there)), key=lambda i: len(features[i] & left))
        chosen.append(there[best])
        left -= features[best]
    return chosen


def _pairs(launch: Launch) -> set[Hashable]:
    return {*combinations(_values(launch), 2), launch.capability}


def _values(launch: Launch) -> list[tuple[str, Hashable]]:
    """All but sizes, by name."""
    constants = [(name, str(value)) for name, value in launch.constants if name not in (*_SIZES, *_COUNTS)]
    counts = [(name, value > 1) for name, value in launch.constants if name in _COUNTS]
    options = [(name, getattr(launch, name)) for name in ("num_warps", "num_stages", "max_registers")]
    return [*constants, *counts, *options, *launch.signature]


def faults(launch: Launch, report: Report) -> Iterator[str]:
    """What a kernel must not do, in words."""
    name = launch.kernel.partition(":")[2]
    if report.spilled_bytes:
        yield f"{report.spilled_bytes} bytes of registers spilled"
    if report.shared_bytes > SHARED_MEMORY[launch.capability]:
        yield f"{report.shared_bytes} bytes of shared memory"
    if name in _DOT and report.num_tensor_core == 0:
        yield "no tensor-core instruction"
    if (name in _BULK or _reads_wide_tiles(launch)) and report.num_wide_loads == 0:
        yield "no load of 16 bytes"
    if name in _GEMV and report.num_fma is not None and report.num_fma < _products(launch):
        yield f"{report.num_fma} products for {_products(launch)}"


def _products(launch: Launch) -> int:
    """Of a thread with one block of inputs."""
    values = dict(launch.constants)
    block = int(values["ROWS"] * values["BLOCK_N"] * values["BLOCK_K"])
    return block // (32 * launch.num_warps)


def _reads_wide_tiles(launch: Launch) -> bool:
    """Whether a lane's share of a tile of weights is 16 bytes or more; see quantd.kernels.gpu.weights."""
    values = dict(launch.constants)
    return values.get("BLOCK_K", 0) * values.get("LOW_BITS", 0) >= 256


def reads_code(launch: Launch) -> bool:
    """Whether instructions are counted, which takes as long as compiling.

    Tensor cores are looked for on every target that has them for us; how wide loads are, on one, and where
    there are none in what stands in for them, of most rows.
    """
    name = launch.kernel.partition(":")[2]
    if name in _GEMV:
        return dict(launch.constants)["ROWS"] == 8
    if launch.capability == 90:
        return name in _DOT or name in _BULK or _reads_wide_tiles(launch)
    return name in _DOT and launch.capability >= FIRST_DOT


def all_launches(num_processes: int) -> set[Launch]:
    """What all models launch on all GPUs."""
    # Of their own: what records cannot compile.
    with compilers(num_processes) as pool:
        return set[Launch]().union(*pool.map(_record, MODELS))


def _record(name: str) -> set[Launch]:
    return _recorder().record(name)


@cache
def _recorder() -> Recorder:
    return Recorder()


def compile_launch(launch: Launch, reads_code: bool) -> Report:
    """Compile a launch, in one of `compilers`. Raises the error of a kernel that does not compile."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    module, name = launch.kernel.split(":")
    kernel = getattr(importlib.import_module(module), name)
    names, types = kernel.arg_names, dict(launch.signature)
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        dict(launch.constants),
        {(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible},
    )
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "maxnreg": launch.max_registers,
    }
    compiled = triton.compile(source, target=GPUTarget("cuda", launch.capability, 32), options=options)
    return _report(compiled.asm["cubin"], compiled.metadata.shared, reads_code)


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
        num_tensor_core=len(_TENSOR_CORE.findall(code)),
        num_wide_loads=len(_WIDE_LOAD.findall(code)),
        num_fma=len(_FMA.findall(code)),
    )


def _told(tool: str, option: str, cubin: bytes) -> str:
    """What one of the tools that come with triton tells of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout


def wrongs(futures: dict[Launch, Future[Report]]) -> Iterator[str]:
    """Each fault of each launch, with what did not compile."""
    for launch, future in futures.items():
        try:
            found: Sequence[str] = list(faults(launch, future.result()))
        except Exception as error:  # of any kind: triton's own, LLVM's, the assembler's
            found = [f"{type(error).__name__}: {error}"]
        yield from (f"{fault}: {launch}" for fault in found)


def main(kernels: Sequence[str]) -> int:
    """Compile every kind of launch of the kernels named, or of all; the exit status."""
    num_processes, found = os.cpu_count() or 1, 0
    launches = [
        launch
        for launch in kinds(all_launches(num_processes))
        if not kernels or launch.kernel.partition(":")[2] in kernels
    ]
    print(f"{len(launches)} launches", flush=True)
    with compilers(num_processes) as pool:
        futures = {launch: pool.submit(compile_launch, launch, reads_code(launch)) for launch in launches}
        for wrong in wrongs(futures):
            found += 1
            print(wrong, flush=True)
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
