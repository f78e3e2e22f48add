"""Every path of the C code gives the same bits, with any number of threads, inside its bounds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from cpu_cases import VARIANTS, cpu_ops, every_op
from torch import Tensor

import quantd.kernels.cpu.ops as cpu_ops_module
from quantd.kernels.cpu.build import BuildError, Variant, build

GUARD = 64


def assert_same_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


@pytest.mark.parametrize("activations", ["auto", "fp32"])
@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_paths_agree_bit_by_bit(variant: Variant, activations: str) -> None:
    mode = "auto" if activations == "auto" else "fp32"
    assert_same_bits(every_op(cpu_ops(mode, variant)), every_op(cpu_ops(mode, "native")))


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_threads_agree_bit_by_bit(threads: int) -> None:
    assert_same_bits(every_op(cpu_ops(threads=threads)), every_op(cpu_ops()))


def test_outputs_are_written_whole_and_nothing_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = every_op(cpu_ops())
    buffers = []

    def poisoned(like: Tensor, width: int) -> Tensor:
        buffer = torch.full((len(like) * width + 2 * GUARD,), torch.nan)
        buffers.append(buffer)
        return buffer[GUARD:-GUARD].view(len(like), width)

    monkeypatch.setattr(cpu_ops_module, "_new", poisoned)
    assert_same_bits(every_op(cpu_ops()), expected)
    for buffer in buffers:
        assert buffer[:GUARD].isnan().all()
        assert buffer[-GUARD:].isnan().all()
        assert not buffer[GUARD:-GUARD].isnan().any()


def test_idle_threads_cost_nothing() -> None:
    ops = cpu_ops(threads=8)
    ops.rms_norm(torch.randn(100, 64), torch.rand(64), 1e-5)
    time.sleep(0.2)
    begun = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - begun < 0.1


DRIVER = """
import sys
sys.path.insert(0, {folder!r})
from cpu_cases import cpu_ops, every_op
for mode in ("auto", "fp32"):
    every_op(cpu_ops(mode, "sanitized"))
print("clean")
"""


def test_every_op_runs_under_the_sanitizers() -> None:
    """AddressSanitizer and UndefinedBehaviorSanitizer end the process where they find something."""
    try:
        build("sanitized")
        runtimes = [sanitizer(name) for name in ("libasan.so", "libubsan.so")]
    except BuildError as error:
        pytest.skip(f"no sanitizers here: {error}")
    environment = os.environ | {"LD_PRELOAD": ":".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0"}
    driver = DRIVER.format(folder=str(Path(__file__).parent))
    done = subprocess.run([sys.executable, "-c", driver], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "clean"


def sanitizer(name: str) -> str:
    """The compiler's runtime library of that name."""
    found = subprocess.run(["cc", f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        raise BuildError(f"no {name}")
    return found
