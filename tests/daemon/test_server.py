"""The daemon as a process, without a model: start, signals, second daemons, what it imports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quantd.daemon.config import EngineOptions, ServeConfig
from quantd.daemon.server import engine_config
from quantd.engine.errors import RequestError

SERVE = (
    "import sys; from pathlib import Path; from quantd.daemon.config import load_config;"
    "from quantd.daemon.server import run_server; from quantd.kernels.errors import QuantdError\n"
    "try: status = run_server(load_config(dict(socket=sys.argv[1], port=sys.argv[2])))\n"
    "except QuantdError as error: sys.exit(str(error))\n"
    "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    "print('HEAVY', sorted(heavy), file=sys.stderr)\n"
    "sys.exit(status)"
)


@contextlib.contextmanager
def serving(path: Path, port: str = "off") -> Iterator[subprocess.Popen[str]]:
    """A daemon that has said READY."""
    process = start(path, port)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith(f"READY unix:{path}"), line + process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def start(path: Path, port: str = "off") -> subprocess.Popen[str]:
    env = os.environ | {"QUANTD_HOME": str(path.parent / "home")}
    command = [sys.executable, "-c", SERVE, str(path), port]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)


def ask(path: Path, request: str) -> bytes:
    """The answer to one request with a host that exists nowhere."""
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        client.sendall(f"{request} HTTP/1.1\r\nHost: any-name\r\nConnection: close\r\n\r\n".encode())
        return b"".join(iter(lambda: client.recv(65536), b""))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(tmp_path: Path, number: int) -> None:
    path = tmp_path / "api.sock"
    with serving(path) as process:
        assert b"200 OK" in ask(path, "GET /v1/models")
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "HEAVY []" in errors and "Traceback" not in errors
        assert not path.exists()


def test_a_stop_request_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with serving(path) as process:
        status = json.loads(ask(path, "GET /quantd/status").split(b"\r\n\r\n", 1)[1])
        assert status["pid"] == process.pid and status["listening"] == [f"unix:{path}"]
        assert b"200 OK" in ask(path, "POST /quantd/stop")
        assert process.wait(20) == 0


def test_a_killed_daemons_socket_is_taken_over_and_a_live_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with serving(path) as process:
        process.kill()
        process.wait()
        assert path.exists()
    with serving(path, "0") as process:
        second = start(path)
        _, errors = second.communicate(timeout=20)
        assert second.returncode == 1 and str(path) in errors and "Traceback" not in errors
        listening = json.loads(ask(path, "GET /quantd/status").split(b"\r\n\r\n", 1)[1])["listening"]
        port = listening[1].rpartition(":")[2]
        third = start(tmp_path / "other.sock", port)
        _, errors = third.communicate(timeout=20)
        assert third.returncode == 1 and f"127.0.0.1:{port}" in errors
        assert b"200 OK" in ask(path, "GET /health")
        assert process.poll() is None


def test_what_is_not_http_takes_a_line_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with serving(path) as process:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nCookie: " + b"a" * 10_000 + b"\r\n\r\n")
            assert b"400" in client.recv(1000)
        assert b"200 OK" in ask(path, "GET /health")
        process.terminate()
        _, errors = process.communicate(timeout=20)
        assert "not HTTP" in errors and "Traceback" not in errors


def test_engine_options_of_a_load_are_checked(tmp_path: Path) -> None:
    config = engine_config(ServeConfig(engine=EngineOptions(threads=2)), tmp_path, {"kv_dtype": "fp32"})
    assert (config.model_path, config.threads, config.kv_dtype) == (str(tmp_path), 2, "fp32")
    for options in ({"model_path": "/etc"}, {"kv_dtype": "int3"}, {"threads": "2"}, {"nosuch": 1}):
        with pytest.raises(RequestError, match="options"):
            engine_config(ServeConfig(), tmp_path, options)
