"""The wheel holds all that runs: it is built, installed into a fresh environment, and used from there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("daemon", "engine", "kernels", "quant", "systemd")


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout gets no build folder and lends it no stale files."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
        )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, cwd=source)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with the wheel, and the dependencies of this one."""
    home = tmp_path_factory.mktemp("venv")
    venv.create(home, symlinks=True)
    python = home / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    # A plain path entry: .pth files of the other environment, such as this checkout's, are not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    run(
        sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel, cwd=home
    )
    return home / "bin"


def sources() -> list[Path]:
    paths = [path.relative_to(ROOT) for name in PACKAGES for path in (ROOT / name).rglob("*")]
    return [
        path for path in paths if path.suffix in {".py", ".c", ".h", ".html", ".service", ".socket", ".conf"}
    ]


def test_the_wheel_holds_every_source(wheel: Path) -> None:
    assert wheel.name.startswith("quantd-") and wheel.name.endswith("-py3-none-any.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    assert {str("quantd" / path) for path in sources()} <= held
    others = {name for name in held if not name.startswith("quantd/")}
    assert all(".dist-info/" in name for name in others)


def test_every_module_imports_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    names = [
        str("quantd" / path.with_suffix("")).replace("/", ".") for path in sources() if path.suffix == ".py"
    ]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    module = importlib.import_module(name)\n"
        "    assert module.__file__.startswith(sys.prefix), module.__file__\n"
        "print(len(sys.argv) - 1)\n"
    )
    assert int(run(installed / "python", "-c", code, *names, cwd=tmp_path)) == len(names) > 20


def test_the_command_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    assert "Serve quantized language models" in run(installed / "quantd", "--help", cwd=tmp_path)
