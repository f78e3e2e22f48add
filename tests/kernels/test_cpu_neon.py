"""Paths of the C kernels against plain C, through a program of their own; arm64 runs in an emulator."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cpu_cases import VARIANTS

from quantd.kernels import cpu
from quantd.kernels.cpu.build import BuildError, Variant, build, compiler

PROGRAM = Path(__file__).parent / "csrc" / "path_check.c"
HEADERS = Path(cpu.__file__).parent / "csrc"
# A case of so many is run: some 130, in which every parameter takes each of its values.
EVERY = 29
CROSS_COMPILER = "aarch64-linux-gnu-gcc"
EMULATOR = "qemu-aarch64"


def output(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


def cases(variant: Variant, folder: Path, emulator: list[str]) -> tuple[str, list[str]]:
    """Name of the variant's path, and a line with parameters and hash for each case."""
    try:
        library = build(variant)
    except BuildError as error:
        pytest.skip(f"no {variant} kernels on this machine: {error}")
    program = str(folder / f"check-{variant}")
    flags = ["-std=gnu99", "-O2", "-ffp-contract=off", f"-I{HEADERS}"]
    output([*compiler(), *flags, str(PROGRAM), str(library), "-o", program])
    path, *lines = output([*emulator, program, str(EVERY)]).splitlines()
    return path, lines


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path, lines = cases("portable", tmp_path_factory.mktemp("portable"), [])
    assert path == "portable"
    assert len(lines) > 100
    return lines


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "portable"])
def test_paths_of_this_cpu_give_the_bits_of_plain_c(
    variant: Variant, portable: list[str], tmp_path: Path
) -> None:
    _, lines = cases(variant, tmp_path, [])
    assert lines == portable


def emulator() -> list[str]:
    """The command that runs programs for arm64; skips the test without it or a compiler for them."""
    for name in (CROSS_COMPILER, EMULATOR):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
    libc = Path(output([CROSS_COMPILER, "-print-file-name=libc.so.6"]).strip())
    if not libc.is_absolute():
        pytest.skip(f"{CROSS_COMPILER} has no C library")
    return [EMULATOR, "-L", str(libc.resolve().parents[1])]


@pytest.mark.parametrize(
    ("march", "expected_path"),
    [("armv8.2-a+dotprod", "neon-dotprod"), ("armv8.6-a+i8mm", "neon-i8mm")],
)
def test_neon_gives_the_bits_of_plain_c(
    march: str, expected_path: str, portable: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cross compiler knows no -march=native, so `native` is what $CC says."""
    command = emulator()
    monkeypatch.setitem(os.environ, "CC", f"{CROSS_COMPILER} -march={march}")
    path, lines = cases("native", tmp_path, command)
    assert path == expected_path
    assert lines == portable
