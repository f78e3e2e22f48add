"""Compiling the kernels: once, into the cache, whole; and what happens without a compiler."""

from __future__ import annotations

import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quantd.kernels.cpu import load_ops
from quantd.kernels.cpu.build import BuildError, build, default_cache

COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
echo "$@" >> {folder}/log
for word; do
  case "$word" in {refuses}) echo "no $word" >&2; exit 1;; esac
  if [ "$last" = -o ]; then echo library > "$word"; fi
  last=$word
done
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a compiler that only writes files and a log."""
    fake_compiler(tmp_path)
    monkeypatch.setenv("CC", f"{tmp_path}/cc -pipe")
    return tmp_path


def fake_compiler(folder: Path, version: str = "cc 1", refuses: str = "-never") -> None:
    compiler = folder / "cc"
    # The fake is called as `cc -pipe --version`.
    script = COMPILER.replace('"$1"', '"$2"').format(version=version, folder=folder, refuses=refuses)
    compiler.write_text(script)
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)


def num_calls(folder: Path) -> int:
    return len((folder / "log").read_text().splitlines())


def test_a_library_is_compiled_once(folder: Path) -> None:
    cache = folder / "cache"
    library = build("native", cache)
    assert library.read_text() == "library\n"
    calls = num_calls(folder)
    assert build("native", cache) == library
    assert num_calls(folder) == calls
    assert list(cache.iterdir()) == [library]


def test_another_compiler_or_variant_is_another_library(folder: Path) -> None:
    cache = folder / "cache"
    libraries = {build("native", cache), build("portable", cache)}
    fake_compiler(folder, version="cc 2")
    libraries.add(build("native", cache))
    assert len(libraries) == 3


def test_flags_that_a_compiler_does_not_know_are_left_out(folder: Path) -> None:
    fake_compiler(folder, refuses="-march=native")
    build("native", folder / "cache")
    assert "-mcpu=native" in (folder / "log").read_text().splitlines()[-1]


def test_of_several_that_build_at_once_one_does_for_all(folder: Path) -> None:
    build("native", folder / "alone")
    alone = (folder / "log").read_text().count(" -c ")
    cache = folder / "cache"
    with ThreadPoolExecutor(4) as pool:
        libraries = set(pool.map(lambda _: build("native", cache), range(4)))
    assert len(libraries) == 1
    assert list(cache.iterdir()) == list(libraries)
    assert (folder / "log").read_text().count(" -c ") == 2 * alone > 0


def test_what_a_killed_build_left_goes_once_it_is_old(folder: Path) -> None:
    cache = folder / "cache"
    for name in ("building-old", "building-new"):
        (cache / name).mkdir(parents=True)
        (cache / name / "attention.o").touch()
    os.utime(cache / "building-old", (0, 0))
    library = build("native", cache)
    assert sorted(cache.iterdir()) == [cache / "building-new", library]


def test_the_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "quantd" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "quantd" / "kernels"


def test_a_failure_names_the_command_and_what_it_said(folder: Path) -> None:
    fake_compiler(folder, refuses="-O3")
    with pytest.raises(BuildError, match="no -O3"):
        build("native", folder / "cache")


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false"])
def test_without_a_compiler_there_are_no_ops(
    compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert load_ops(cache=tmp_path) is None
    assert len(caplog.records) == 1
    assert compiler in caplog.text


def test_a_library_that_does_not_load_gives_no_ops(folder: Path) -> None:
    assert load_ops(cache=folder / "cache") is None
