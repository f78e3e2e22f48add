"""The daemon as a process, without a model: start, signals, second daemons, what it imports."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import PATIENCE

from quantd.daemon.access.keys import KeyFile
from quantd.daemon.config import EngineOptions, ServeConfig
from quantd.daemon.server import engine_config
from quantd.engine.errors import RequestError

SERVE = (
    "import sys; from pathlib import Path; from quantd.daemon.config import load_config;"
    "from quantd.daemon.server import run_server; from quantd.kernels.errors import QuantdError\n"
    "try: status = run_server(load_config(dict(socket=sys.argv[1], port=sys.argv[2], host=sys.argv[3])))\n"
    "except QuantdError as error: sys.exit(str(error))\n"
    "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    "print('HEAVY', sorted(heavy), file=sys.stderr)\n"
    "sys.exit(status)"
)


@contextlib.contextmanager
def serving(path: Path, port: str = "off", host: str = "127.0.0.1") -> Iterator[subprocess.Popen[str]]:
    """A daemon that has said READY."""
    process = start(path, port, host)
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert line.startswith(f"READY unix:{path}"), line + process.stderr.read()
        yield process
    finally:
        process.kill()
        process.communicate()


def start(path: Path, port: str = "off", host: str = "127.0.0.1") -> subprocess.Popen[str]:
    env = os.environ | {"QUANTD_HOME": str(path.parent / "home")}
    command = [sys.executable, "-c", SERVE, str(path), port, host]
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
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert "HEAVY []" in errors and "Traceback" not in errors
        assert not path.exists()


def test_a_stop_request_ends_it(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with serving(path) as process:
        status = json.loads(ask(path, "GET /quantd/status").split(b"\r\n\r\n", 1)[1])
        assert status["pid"] == process.pid and status["listening"] == [f"unix:{path}"]
        assert b"200 OK" in ask(path, "POST /quantd/stop")
        assert process.wait(PATIENCE) == 0


def test_a_killed_daemons_socket_is_taken_over_and_a_live_ones_is_not(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with serving(path) as process:
        process.kill()
        process.wait()
        assert path.exists()
    with serving(path, "0") as process:
        second = start(path)
        _, errors = second.communicate(timeout=PATIENCE)
        assert second.returncode == 1 and str(path) in errors and "Traceback" not in errors
        listening = json.loads(ask(path, "GET /quantd/status").split(b"\r\n\r\n", 1)[1])["listening"]
        port = listening[1].rpartition(":")[2]
        third = start(tmp_path / "other.sock", port)
        _, errors = third.communicate(timeout=PATIENCE)
        assert third.returncode == 1 and f"127.0.0.1:{port}" in errors
        assert b"200 OK" in ask(path, "GET /health")
        assert process.poll() is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_others_reach_is_refused_without_a_key(tmp_path: Path, host: str) -> None:
    path = tmp_path / "api.sock"
    refused = start(path, "0", host)
    _, errors = refused.communicate(timeout=PATIENCE)
    assert refused.returncode == 1 and "Traceback" not in errors
    assert "other machines can reach this" in errors and "quantd key add NAME" in errors
    assert not path.exists()


def test_with_a_key_all_addresses_are_served_to_who_has_it(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    key = KeyFile(tmp_path / "home" / "state" / "keys.json").add("a")
    with serving(path, "0", "0.0.0.0"):
        listening = json.loads(ask(path, "GET /quantd/status").split(b"\r\n\r\n", 1)[1])["listening"]
        url = f"http://127.0.0.1:{listening[1].rpartition(':')[2]}/v1/models"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(url, timeout=PATIENCE)
        request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            assert response.status == 200


def test_what_is_not_http_takes_a_line_of_the_log(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    with serving(path) as process:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET / HTTP/1.1\r\nHost: x\r\nCookie: " + b"a" * 20_000 + b"\r\n\r\n")
            head, body = client.recv(1000).split(b"\r\n\r\n")
            assert head.split()[1] == b"431" and b"16384 bytes" in body
            assert json.loads(body)["error"]["type"] == "invalid_request_error"
        assert b"200 OK" in ask(path, "GET /health")
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE)
        assert "not HTTP" in errors and "Traceback" not in errors


def test_engine_options_of_a_load_are_checked(tmp_path: Path) -> None:
    config = engine_config(ServeConfig(engine=EngineOptions(threads=2)), tmp_path, {"kv_dtype": "fp32"})
    assert (config.model_path, config.threads, config.kv_dtype) == (str(tmp_path), 2, "fp32")
    for options in ({"model_path": "/etc"}, {"kv_dtype": "int3"}, {"threads": "2"}, {"nosuch": 1}):
        with pytest.raises(RequestError, match="options"):
            engine_config(ServeConfig(), tmp_path, options)
