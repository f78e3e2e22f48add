"""`quantd doctor`: each fault is found where there is one, and comes with what mends it."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import socket
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from fake_daemon import FakeDaemon, Quantd
from homes import share_kernels

from quantd.daemon.config import Paths
from quantd.daemon.doctor.finding import Finding
from quantd.daemon.doctor.listening import look_at_group, look_at_port, look_at_socket
from quantd.daemon.doctor.machine import look_at_memory, look_at_processor
from quantd.daemon.doctor.services import look_at_units
from quantd.daemon.doctor.storage import look_at_folders, look_at_models
from quantd.daemon.store import Store
from quantd.quant.safetensors_file import read_index

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")


def by_name(findings: object) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}  # type: ignore[attr-defined]


def open_to_all(folder: Path) -> None:
    """Let others into pytest's folder, which is its own else."""
    for each in (folder, *folder.parents[:-2]):
        each.chmod(0o755)


def as_nobody(look: Callable[[], Finding]) -> Finding:
    """What somebody without any rights finds."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads, of which the child needs none
        child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, pickle.dumps(look()))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        finding: Finding = pickle.loads(file.read())
    os.waitpid(child, 0)
    return finding


def test_sockets(fake_daemon: FakeDaemon) -> None:
    path = fake_daemon.socket
    path.chmod(0o660)
    found = look_at_socket(path)
    assert found.fault is None and found.value.startswith("quantd 0.1.0 answers, process 4194305; rw-rw----")
    path.chmod(0o666)
    found = look_at_socket(path)
    assert found.fault == "every user of this machine may use the daemon"
    assert found.fix == f"sudo chmod 0660 {path}"
    assert look_at_socket(path.with_name("none")) == Finding("sockets", f"{path.parent}/none", "no daemon")


def test_the_socket_of_a_daemon_that_is_gone(short_folder: str) -> None:
    path = Path(short_folder) / "s"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    found = look_at_socket(path)
    assert (found.value, found.fault, found.fix) == ("a dead daemon's", None, f"rm {path}")


@as_root
def test_a_socket_that_is_closed_to_us(fake_daemon: FakeDaemon) -> None:
    path = fake_daemon.socket
    path.chmod(0o660)
    for mode in (0o700, 0o755):
        path.parent.chmod(mode)
        found = as_nobody(lambda: look_at_socket(path))
        assert found.value == "closed to us", found
        assert "only root and the group root may" in str(found.fault)
        assert str(found.fix).startswith("sudo usermod -aG root ")


@as_root
def test_the_group_of_the_machines_daemon(fake_daemon: FakeDaemon) -> None:
    assert list(look_at_group(system_socket=fake_daemon.socket)) == [], "root needs none"
    fake_daemon.socket.parent.chmod(0o755)
    found = as_nobody(lambda: next(look_at_group(system_socket=fake_daemon.socket)))
    assert found.fault is not None and found.fix in (
        "sudo quantd service install",
        "sudo usermod -aG quantd nobody",
    )


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_who_holds_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((address, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        port = listener.getsockname()[1]
        (tmp_path / "c.toml").write_text(f"port = {port}\n")
        monkeypatch.setenv("QUANTD_CONFIG", str(tmp_path / "c.toml"))
        assert look_at_port(frozenset()).value == "free"
        listener.listen()
        found = look_at_port(frozenset())
        assert f"process {os.getpid()}" in found.value and "taken by" in str(found.fault)
        assert found.fix == f"kill {os.getpid()}, or quantd serve --port {port + 1}"
        assert look_at_port(frozenset([os.getpid()])).fault is None
        if os.geteuid() == 0:
            open_to_all(tmp_path)
            # The child has the listener too, until it closes it.
            hidden = as_nobody(lambda: listener.close() or look_at_port(frozenset()))
            assert hidden.fault is not None and f"sudo ss -ltnp 'sport = :{port}'" in str(hidden.fix)
    (tmp_path / "c.toml").write_text("port = 'off'\n")
    assert look_at_port(frozenset()).value == "off"


def test_memory(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("meminfo", "huge", "overcommit")]
    for path, text in zip(
        files,
        ("MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\n", "always [madvise] never\n", "0\n"),
        strict=True,
    ):
        path.write_text(text)
    good = by_name(look_at_memory(*files))
    assert all(each.fault is None and each.note is None for each in good.values())
    assert good["ram"].value == "8.2 GB of 16.4 GB free" and good["huge pages"].value == "madvise"
    for path, text in zip(
        files,
        ("MemTotal: 16000000 kB\nMemAvailable: 800000 kB\n", "always madvise [never]\n", "2\n"),
        strict=True,
    ):
        path.write_text(text)
    bad = by_name(look_at_memory(*files))
    assert bad["ram"].note is not None and bad["huge pages"].note is not None
    assert bad["overcommit"].fix == "sudo sysctl vm.overcommit_memory=0" and bad["overcommit"].fault
    assert [each.name for each in look_at_memory(*[tmp_path / "no"] * 3)] == ["limit"]


def test_a_compiler_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "no-such-cc")
    found = next(each for each in look_at_processor(tmp_path) if each.name == "compiler")
    assert "no-such-cc" in str(found.fault) and found.fix == "unset CC"


@as_root
def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    paths = Paths.from_env({"QUANTD_HOME": str(tmp_path / "home")})
    assert not any(each.fault for each in look_at_folders(paths))
    open_to_all(tmp_path)
    found = as_nobody(lambda: by_name(look_at_folders(paths))["models"])
    assert found.fault == f"{tmp_path} cannot be written" and str(found.fix).endswith(str(tmp_path))


@pytest.fixture
def models(tmp_path: Path, fixture_folders: dict[str, Path]) -> Path:
    """A store with one model, a broken download, and a folder of somebody's."""
    root = tmp_path / "models"
    source = tmp_path / "source"
    shutil.copytree(fixture_folders["gptqmodel-4b-g32-v2"], source)
    shutil.copy(next((Path(__file__).parents[1] / "data" / "tokenizer").rglob("tokenizer.json")), source)
    Store(root).import_path(source, "tiny", copy=True)
    (root / ".partial-x").mkdir()
    (root / ".partial-x" / "weights").write_bytes(b"x" * 1000)
    (root / "stray").mkdir()
    return root


def test_models(models: Path) -> None:
    found = by_name(look_at_models(models, thoroughly=False))
    assert found["stored"].value.startswith("1, ") and "tiny" not in found
    assert found[".partial-x"].fix == f"rm -r {models / '.partial-x'}"
    assert "quantd import" in str(found["stray"].fix)
    assert by_name(look_at_models(models, thoroughly=True))["tiny"].value.endswith("whole")
    weights = next(iter(read_index(models / "tiny").values())).file
    whole = weights.read_bytes()
    for damaged in (whole[:-100], b"\xff" * 8 + whole[8:]):
        weights.write_bytes(damaged)
        tiny = by_name(look_at_models(models, thoroughly=True))["tiny"]
        assert tiny.fault is not None and weights.name in tiny.fault
        assert str(tiny.fix).startswith("quantd rm tiny && quantd import ")
    weights.write_bytes(whole)
    (models / "tiny" / "tokenizer.json").unlink()
    assert "tokenizer.json" in str(by_name(look_at_models(models, thoroughly=True))["tiny"].fault)


SYSTEMCTL = """#!/bin/sh
case "$*" in
  "--user show quantd.service"*) printf 'LoadState=loaded\\nActiveState=failed\\nSubState=failed\\n'
    printf 'ExecStart={ path=/bin/sh ; argv[]=sh }\\n' ;;
  "--user show quantd.socket"*) printf 'LoadState=loaded\\nActiveState=inactive\\n' ;;
  "show quantd.service"*) printf 'LoadState=loaded\\nActiveState=inactive\\n'
    printf 'ExecStart={ path=/gone/quantd ; }\\n' ;;
  *) printf 'LoadState=not-found\\nActiveState=inactive\\n' ;;
esac
"""


def test_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripts = {"systemctl": SYSTEMCTL, "journalctl": "#!/bin/sh\necho 'ERROR the port is taken'\n"}
    for name, script in scripts.items():
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = by_name(look_at_units())
    failed = found["user quantd.service"]
    assert failed.fault == "it has failed: ERROR the port is taken"
    assert "systemctl --user reset-failed quantd.service && systemctl --user start" in str(failed.fix)
    assert found["user quantd.socket"].fix == "systemctl --user enable --now quantd.socket"
    gone = found["system quantd.service"]
    assert "/gone/quantd" in str(gone.fault) and gone.fix == "sudo quantd service install"
    assert found["system quantd.socket"] == Finding("units", "system quantd.socket", "not installed")


def test_without_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert {each.value for each in look_at_units()} == {"not installed"}


def test_the_command(quantd: Quantd, environment: dict[str, str]) -> None:
    home = Path(environment["QUANTD_HOME"])
    share_kernels(home)
    (home / "quantd.toml").write_text("port = 'off'\nno_such_key = 1\n")
    done = quantd("doctor", "--models")
    assert done.returncode == 1
    assert re.search(rf"fault: .*no_such_key.*\n    fix: edit {home}/quantd.toml\n", done.stdout)
    assert re.search(r"\n\d+ faults?\.\n$", done.stdout)
    for section in (
        "versions",
        "paths",
        "processor",
        "memory",
        "sockets",
        "ports",
        "units",
        "models",
        "gpus",
    ):
        assert f"\n{section}:\n" in f"\n{done.stdout}"
    gpus = done.stdout.partition("gpus:\n")[2].splitlines()
    assert gpus[0].startswith("  driver     ") and f"  triton     {metadata.version('triton')}" in gpus


def test_kernels_that_cannot_be_kept_want_no_compiler(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = [each for each in look_at_processor(tmp_path / "file" / "kernels") if each.name == "kernels"]
    assert found[0].fault is not None and found[0].fix == f"let {tmp_path}/file/kernels be written"


def test_a_file_system_that_is_read_only_wants_no_chown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = list(os.statvfs(tmp_path))
    told[8] |= os.ST_RDONLY  # f_flag, of statvfs(3)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result(told))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = list(look_at_folders(Paths.from_env({"QUANTD_HOME": str(tmp_path)})))
    assert found[0].fault == f"{tmp_path} cannot be written"
    assert found[0].fix is not None and "QUANTD_HOME" in found[0].fix
