"""The benchmark of the GPU path, gone through without a GPU, so that it is whole when there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bench.gpu_sides.interpreter import bfloat16_bits

SCRIPT = Path(__file__).parents[1] / "bench" / "gpu.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, SCRIPT, *options], capture_output=True, text=True, timeout=280, env=environment
    )


@pytest.fixture(scope="module")
def table() -> dict[str, Any]:
    """All sections in the interpreter."""
    done = run("--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    record: dict[str, Any] = json.loads(done.stdout)
    return record


def test_every_measure_is_taken(table: dict[str, Any]) -> None:
    assert table["missing"] == []
    names = [row["measure"] for row in table["rows"]]
    assert len(set(names)) == len(names)
    assert all(row["figure"] >= 0 for row in table["rows"])


def test_every_kernel_is_near_its_reference(table: dict[str, Any]) -> None:
    checks = [row for row in table["rows"] if row["measure"].startswith("check: ")]
    assert len(checks) > 20
    assert [row["measure"] for row in checks if row["met"] is False] == []


def test_the_goals_are_in_the_table(table: dict[str, Any]) -> None:
    goals = {row["measure"]: row["goal"] for row in table["rows"] if row["better"] == "more" and row["goal"]}
    assert goals == {
        "W4A16, 128 x 128, 1 rows": 0.6,
        "rms_norm, 4 x 64": 0.8,
        "add_rms_norm, 4 x 64": 0.8,
        "rope and KV write, int8, 4 tokens": 0.8,
        "rope and KV write, fp16, 4 tokens": 0.8,
        "tiny decode, one client": 220,
    }


def test_what_the_interpreter_makes_a_bfloat16_is_what_torch_does() -> None:
    torch.manual_seed(0)
    edges = [0.0, -0.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 3.4e38, torch.inf, -torch.inf, torch.nan, 1e-45, 1e-39]
    values = torch.cat([torch.tensor(edges), torch.randn(3000) * 10.0 ** torch.randint(-38, 38, (3000,))])
    ours = torch.from_numpy(bfloat16_bits(values.numpy()).view("int16")).view(torch.bfloat16)
    torch.testing.assert_close(ours, values.bfloat16(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure for minutes")
def test_without_a_gpu_it_says_so() -> None:
    done = run()
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "no NVIDIA GPU here (or none that torch can use): nothing measured\n"
