"""What doctor says of GPUs: of this machine's as they are, of others' from their reports."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from click.testing import CliRunner

from quantd.daemon.cli import tune
from quantd.daemon.cli.gpus import gpu_lines, gpu_problems, gpu_section, lacking_for_launches
from quantd.daemon.config import Paths
from quantd.daemon.store import Store
from quantd.engine.config import EngineConfig
from quantd.kernels.gpu.report import GpuDevice, GpuReport, collect, kernels_for

DATA = Path(__file__).parents[1] / "data"
TURING = GpuDevice(
    name="RTX 2070", capability=75, memory_total=8_000_000_000, memory_free=7_000_000_000, kernels="some"
)
ADA = GpuDevice(
    name="RTX 4090", capability=89, memory_total=24_000_000_000, memory_free=23_500_000_000, kernels="more"
)
REPORT = GpuReport(
    driver="570.1",
    boards=["0000:01:00.0", "0000:02:00.0"],
    torch="2.13.0+cu128",
    torch_cuda="12.8",
    triton="3.9.0",
    devices=[ADA, TURING],
    peers=[],
)


def problems(lacking: str | None = None, **changes: object) -> list[str]:
    return list(gpu_problems(msgspec.structs.replace(REPORT, **changes), lacking))


def test_two_gpus_without_faults() -> None:
    assert list(gpu_lines(REPORT, None)) == [
        ("driver", "570.1"),
        ("torch", "built for CUDA 12.8"),
        ("triton", "3.9.0"),
        ("gpu 0", "RTX 4090, sm_89, 23.5 GB of 24.0 GB free; more"),
        ("gpu 1", "RTX 2070, sm_75, 7.0 GB of 8.0 GB free; some"),
        ("peers", "none, ranks exchange through the host's memory"),
    ]
    assert gpu_section(REPORT, None)["problems"] == []


@pytest.mark.parametrize(("peers", "line"), [([(0, 1), (1, 0)], "0-1"), ([(0, 1)], "none, ranks")])
def test_peers_are_those_that_reach_each_other(peers: list[tuple[int, int]], line: str) -> None:
    lines = dict(gpu_lines(msgspec.structs.replace(REPORT, peers=peers), None))
    assert lines["peers"].startswith(line)


@pytest.mark.parametrize(
    ("changes", "fault", "remedy"),
    [
        (
            {"driver": None, "devices": []},
            "0000:01:00.0, 0000:02:00.0 has no driver",
            "install NVIDIA's driver",
        ),
        (
            {"torch_cuda": None, "torch": "2.13.0+cpu", "devices": []},
            "2.13.0+cpu is built for CPUs",
            "install",
        ),
        ({"cuda_error": "driver too old", "devices": []}, "(driver too old)", "update the driver"),
        ({"triton": None}, "triton cannot be imported", "pip install triton"),
        ({"lacking": "triton needs this: install that"}, "triton needs this", "install that"),
        (
            {"cuda_error": "No CUDA GPUs are available", "visible": "7", "devices": []},
            "CUDA_VISIBLE_DEVICES is '7'",
            "unset it",
        ),
        (
            {"devices": [ADA, msgspec.structs.replace(TURING, capability=61, kernels="")]},
            "gpu 1 (RTX 2070) is sm_61",
            "CUDA_VISIBLE_DEVICES",
        ),
    ],
)
def test_each_fault_comes_with_its_remedy(changes: dict[str, object], fault: str, remedy: str) -> None:
    (problem,) = problems(**changes)
    assert fault in problem
    assert remedy in problem


def test_nothing_is_wrong_with_a_machine_that_has_no_gpu() -> None:
    assert (
        problems(driver=None, boards=[], devices=[], torch_cuda=None, triton=None, lacking="a compiler") == []
    )


def test_gpus_that_are_hidden_are_no_fault() -> None:
    hidden = msgspec.structs.replace(REPORT, devices=[], cuda_error="No CUDA GPUs are available", visible="")
    assert dict(gpu_lines(hidden, None))["devices"] == "none, hidden by CUDA_VISIBLE_DEVICES"
    assert list(gpu_problems(hidden, None)) == []


def test_what_launches_need_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr(sysconfig, "get_path", lambda *_: str(tmp_path))
    lacking = lacking_for_launches()
    assert lacking is not None and str(tmp_path / "Python.h") in lacking and "python3-dev" in lacking
    (tmp_path / "Python.h").touch()
    assert lacking_for_launches() is None
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install gcc" in (lacking_for_launches() or "")


def test_a_helper_that_fails_is_reported() -> None:
    assert gpu_section("No module named 'torch'", None) == {
        "problems": ["the GPUs cannot be looked at: No module named 'torch'"]
    }
    assert list(gpu_lines("killed", None)) == [("problem", "the GPUs cannot be looked at: killed")]


def test_boards_and_drivers_are_found_in_sys(tmp_path: Path) -> None:
    for name, vendor, kind in (
        ("0000:01:00.0", "0x10de", "0x030000"),
        ("0000:01:00.1", "0x10de", "0x040300"),  # the card's sound
        ("0000:02:00.0", "0x1002", "0x030000"),
        ("0000:03:00.0", "0x10de", "0x030200"),
    ):
        folder = tmp_path / "bus/pci/devices" / name
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(f"{vendor}\n")
        (folder / "class").write_text(f"{kind}\n")
    (tmp_path / "module/nvidia").mkdir(parents=True)
    (tmp_path / "module/nvidia/version").write_text("570.1\n")
    report = collect(tmp_path)
    assert report.boards == ["0000:01:00.0", "0000:03:00.0"]
    assert report.driver == "570.1"


def test_kernels_by_capability() -> None:
    assert kernels_for(70) == ""
    assert "dequantized" in kernels_for(75)
    assert "--same-bits" in kernels_for(75)
    assert kernels_for(80) == kernels_for(120) != kernels_for(75)


def test_the_helper_prints_what_it_finds() -> None:
    command = [sys.executable, "-P", "-m", "quantd.kernels.gpu.report"]
    done = subprocess.run(command, capture_output=True, check=True)
    report = msgspec.json.decode(done.stdout, type=GpuReport)
    assert report.torch == torch.__version__
    assert report.torch_cuda == torch.version.cuda
    assert len(report.devices) == torch.cuda.device_count()


@pytest.fixture
def folder(fixture_folders: dict[str, Path], tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    shutil.copytree(fixture_folders["autogptq-4b-g32-sym"], folder)
    shutil.copy(next((DATA / "tokenizer").rglob("tokenizer.json")), folder)
    return folder


def test_a_model_is_tuned_as_it_is_dealt_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the options, else by the configuration file; each kind of GPU is named with what was found of it."""
    monkeypatch.setenv("QUANTD_HOME", str(tmp_path))
    Store(tmp_path / "models").import_path(folder, "tiny")
    Paths.from_env().config.write_text('[engine]\nbackend = "cpu"\ntp = 2\n')
    asked = []

    def measure(config: str) -> Iterator[dict[str, object]]:
        asked.append(msgspec.json.decode(config, type=EngineConfig))
        for gpu, rank, done, total in (("Ada", 0, 1, 2), ("Ada", 0, 2, 2), ("Ada", 1, 1, 1), ("T4", 2, 1, 1)):
            yield {"gpu": gpu, "rank": rank, "done": done, "total": total, "path": f"{gpu}.json"}

    monkeypatch.setattr(tune, "_tune", measure)
    told = CliRunner().invoke(tune.tune_command, ["tiny", "--split", "1,1"])
    assert (told.exit_code, asked[0].backend, asked[0].tp, asked[0].split) == (0, "gpu", 2, "1,1")
    assert told.stderr.splitlines()[2:] == [
        "Ada: measured 1 of 1 shapes of product of rank 1",
        "T4: measured 1 of 1 shapes of product of rank 2",
    ]
    assert told.stdout.splitlines()[1] == "what was found of T4 is in T4.json"
    told = CliRunner().invoke(tune.tune_command, ["tiny", "--tp", "1", "--json"])
    assert (asked[1].tp, asked[1].split) == (1, "")
    assert json.loads(told.stdout)["gpus"][0] == {"gpu": "Ada", "shapes": 3, "path": "Ada.json"}


def test_without_a_gpu_there_is_nothing_to_tune(quantd, folder: Path) -> None:
    assert quantd("import", str(folder)).returncode == 0
    done = quantd("tune", "tiny", TRITON_INTERPRET="0")
    assert done.returncode == 1
    reason, error = done.stderr.splitlines()[-2:]
    assert "the gpu backend cannot run here" in reason, done.stderr
    assert error == "Error: tuning ended with status 1, for the reason above"
