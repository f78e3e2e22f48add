"""systemd's side of the daemon: its protocols as its own tools speak them, and units as it reads them."""

from __future__ import annotations

import asyncio
import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from daemon_in_loop import in_loop
from waiting import PATIENCE

from quantd.daemon import watch
from quantd.daemon.errors import ListenError
from quantd.daemon.supervision import Notifier, Supervision
from quantd.daemon.watch import Watch, status_line, tell_end
from quantd.engine.messages import Stats

UNITS = Path(__file__).parents[2] / "systemd"
SERVE = (
    "import sys; from quantd.daemon.config import load_config; from quantd.daemon.server import run_server\n"
    "sys.exit(run_server(load_config(dict(idle_exit=sys.argv[1]))))"
)


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"needs {tool}")


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="qd-") as name:
        yield Path(name)


@pytest.fixture
def manager(folder: Path) -> Iterator[socket.socket]:
    """A notify socket as a service manager has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(folder / "notify"))
        channel.settimeout(PATIENCE)
        yield channel


def ask(path: Path, request: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(f"{request} HTTP/1.1\r\nHost: any-name\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: client.recv(65536), b""))


def ask_once_there(path: Path, request: str) -> bytes:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return ask(path, request)
        except (FileNotFoundError, ConnectionRefusedError):
            assert time.monotonic() < deadline
            time.sleep(0.01)


@needs("systemd-socket-activate")
def test_sockets_of_systemd_are_served_and_an_unused_daemon_ends(
    folder: Path, manager: socket.socket
) -> None:
    """Both kinds; the first connection starts the daemon, which says when it answers and when it ends."""
    path = folder / "api.sock"
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    command = ["systemd-socket-activate", "-l", str(path), "-l", address, "--fdname=quantd:quantd"]
    command += ["-E", f"QUANTD_HOME={folder / 'home'}", "-E", f"NOTIFY_SOCKET={folder / 'notify'}"]
    command += ["-E", f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"]
    with subprocess.Popen([*command, sys.executable, "-c", SERVE, "0.3"], stderr=subprocess.PIPE) as process:
        try:
            answer = ask_once_there(path, "GET /quantd/status")
            status = json.loads(answer.split(b"\r\n\r\n", 1)[1])
            assert status["pid"] == process.pid
            assert status["listening"] == [f"unix:{path}", f"http://{address}"]
            told = [manager.recv(4096).decode()]
            while not told[-1].startswith("EXTEND_TIMEOUT_USEC="):
                told.append(manager.recv(4096).decode())
            assert told[0] == "READY=1"
            assert "STATUS=no model in memory" in told and "STOPPING=1" in told
            assert int(told[-1].rpartition("=")[2]) == 15e6
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    assert path.exists(), "the socket is the manager's, who listens on"


def test_variables_for_another_process_or_set_by_half_count_as_none() -> None:
    whole = {"LISTEN_PID": "7", "LISTEN_FDS": "2", "WATCHDOG_PID": "7", "WATCHDOG_USEC": "9000000"}
    whole |= {"LISTEN_FDNAMES": "unix:tcp"}
    assert Supervision.from_env(whole, pid=7) == Supervision(None, 9.0, 2, ("unix", "tcp"))
    assert Supervision.from_env(whole, pid=8) == Supervision()
    assert Supervision.from_env({"LISTEN_PID": "7"}, pid=7) == Supervision()
    assert Supervision.from_env({"LISTEN_FDS": "1", "NOTIFY_SOCKET": ""}, pid=7) == Supervision()
    assert Supervision.from_env({"WATCHDOG_USEC": "500000"}, pid=7).watchdog_seconds == 0.5


def test_what_is_handed_over_must_listen(folder: Path) -> None:
    code = (
        "import os, socket, sys; from quantd.daemon.supervision import Supervision\n"
        "made = socket.socket(socket.AF_UNIX) if sys.argv[1] == 'deaf' else open('/dev/null')\n"
        "os.dup2(made.fileno(), 3)\n"
        "try: Supervision(num_sockets=1, names=('quantd',)).sockets()\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    for kind, reason in (("deaf", "does not listen"), ("file", "is no socket")):
        done = subprocess.run([sys.executable, "-c", code, kind], capture_output=True, text=True, check=True)
        assert (
            done.stdout.startswith(f"{ListenError.__name__} file descriptor 3 (quantd)")
            and reason in done.stdout
        )


def test_the_manager_is_told_and_may_be_gone(folder: Path, manager: socket.socket) -> None:
    notifier = Notifier(str(folder / "notify"))
    notifier.status("one")
    notifier.status("one")
    notifier.alive()
    assert [manager.recv(99) for _ in range(2)] == [b"STATUS=one", b"WATCHDOG=1"]
    for silent in (Notifier(None), Notifier(str(folder / "nobody"))):
        silent.ready()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract:
        abstract.bind("\0quantd-test-" + folder.name)
        Notifier("@quantd-test-" + folder.name).ready()
        assert abstract.recv(99) == b"READY=1"


@dataclass
class Model:
    model: object | None


@dataclass
class Models:
    """Models in memory, those of them that answer, and those that hang for good."""

    entries: Sequence[Model] = ()
    answers: Mapping[str, Stats] = field(default_factory=dict)
    stuck: Sequence[str] = ()

    async def stats(self) -> Mapping[str, Stats]:
        return self.answers


@in_loop
async def test_the_watchdog_hears_of_the_daemon_unless_an_engine_hangs_for_good() -> None:
    with tempfile.TemporaryDirectory(prefix="qd-") as name:
        manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        with manager:
            manager.bind(f"{name}/notify")
            manager.setblocking(False)
            models = Models([Model(object()), Model(None)], {"a": Stats(num_running=2)})
            watch = Watch(models, Notifier(f"{name}/notify"), 9.0, None, lambda: None)
            assert watch.seconds == 3.0
            await watch.look()
            assert manager.recv(99) == b"WATCHDOG=1"
            assert manager.recv(99) == b"STATUS=a: 2 running, 0 waiting; 1 loading or in a long step"
            models.answers, models.stuck = {}, ["a"]
            await watch.look()
            assert manager.recv(99) == b"STATUS=2 loading or in a long step"
            with pytest.raises(BlockingIOError):
                manager.recv(99)


@in_loop
async def test_an_end_asks_for_time_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_TELL_SECONDS", 0.01)
    told: list[str] = []
    notifier = Notifier(None)
    monkeypatch.setattr(notifier, "_send", told.append)
    telling = asyncio.create_task(tell_end(notifier, 0.0, 10.0))
    while told.count("EXTEND_TIMEOUT_USEC=10000000") < 2:
        await asyncio.sleep(0.005)
    telling.cancel()
    assert told[:2] == ["STOPPING=1", "WATCHDOG=1"] and told[3].startswith("STATUS=ending")


@in_loop
async def test_an_unused_daemon_stays_while_a_request_is_answered() -> None:
    ends: list[bool] = []
    busy = [True]
    look_after = Watch(Models(), Notifier(None), None, 0.0, lambda: ends.append(True), lambda: busy[0])
    look_after._unused = 1.0
    await look_after.look()
    assert not ends
    busy[0] = False
    await look_after.look()
    assert ends == [True]


@in_loop
async def test_without_a_limit_an_unused_daemon_stays() -> None:
    ends: list[bool] = []
    watch = Watch(Models(), Notifier(None), None, None, lambda: ends.append(True))
    watch._unused = 1e9
    await watch.look()
    assert not ends and status_line(0, {}) == "no model in memory"


@needs("systemd-analyze")
@pytest.mark.parametrize("folder_name", ["", "user"])
def test_units_are_what_systemd_takes(folder_name: str, tmp_path: Path) -> None:
    """With a command that is there, since no test may install one."""
    for unit in (UNITS / folder_name).glob("quantd*.*"):
        text = re.sub(r"^(Exec\w+)=\S+", r"\1=/bin/true", unit.read_text(), flags=re.MULTILINE)
        (tmp_path / unit.name).write_text(text)
    mode = ["--user"] if folder_name else []
    units = sorted(map(str, tmp_path.glob("quantd*.*")))
    assert len(units) == (2 if folder_name else 3)
    done = subprocess.run(
        ["systemd-analyze", *mode, "verify", *units],
        capture_output=True,
        text=True,
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
    )
    ours = [line for line in done.stderr.splitlines() if "quantd" in line]
    assert (done.returncode, ours) == (0, []), done.stderr


@needs("systemd-analyze")
@pytest.mark.parametrize(
    ("unit", "most"), [("quantd.service", 1.8), ("quantd-sleep.service", 1.8), ("user/quantd.service", 6.5)]
)
def test_services_are_shut_in(unit: str, most: float) -> None:
    """A user's can be shut in less: most of it takes a namespace, which would hide who connects."""
    command = ["systemd-analyze", "security", "--offline=yes", str(UNITS / unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"exposure level for \S+: (\d+\.\d)", done.stdout)
    assert found is not None and float(found[1]) <= most, done.stdout


@needs("systemd-tmpfiles")
def test_the_folder_of_the_socket_is_made(tmp_path: Path) -> None:
    account = pwd.getpwuid(os.getuid()).pw_name
    text = (UNITS / "tmpfiles.conf").read_text().replace("quantd quantd", f"{account} -")
    (tmp_path / "quantd.conf").write_text(text)
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text(Path("/etc/passwd").read_text())
    command = ["systemd-tmpfiles", "--create", f"--root={tmp_path}", str(tmp_path / "quantd.conf")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "quantd").stat().st_mode & 0o7777 == 0o755


@pytest.mark.parametrize("folder_name", ["", "user"])
def test_clients_are_told_apart(folder_name: str) -> None:
    """In a user namespace SO_PEERCRED names every other user `nobody`: all would share rights and salts."""
    text = (UNITS / folder_name / "quantd.service").read_text()
    assert not re.search(r"^(PrivateUsers|DynamicUser)=", text, flags=re.MULTILINE)
