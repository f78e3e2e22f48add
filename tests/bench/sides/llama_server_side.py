"""A llama-server binary measured with the same loads as quantd's daemon, over loopback TCP."""

from __future__ import annotations

import asyncio
import itertools
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from quantd.daemon.bench.loads import Load
from quantd.daemon.bench.results import Result
from quantd.daemon.bench.session import run_loads
from quantd.daemon.errors import DaemonError
from quantd.engine.messages import ModelInfo

_SLOTS = 16
_SLOT_LEN = 1024
_START_SECONDS = 60
_TRIES = 8


@dataclass(frozen=True)
class LlamaServer:
    """A server that answers on a port of this machine.

    Its cache knows no salt: each pass has prompts of its own, or it would find those of the one before.
    """

    port: int
    seeds: Iterator[int] = field(default_factory=itertools.count)

    def run(self, load: Load, info: ModelInfo) -> Result:
        """One pass. info: of the same model in quantd, for the size of the vocabulary.

        It now and then hangs up on a connection that is used again; such a pass is repeated.
        """
        for _ in range(_TRIES - 1):
            with suppress(DaemonError):
                return self._run(load, info)
        return self._run(load, info)

    def _run(self, load: Load, info: ModelInfo) -> Result:
        address = ("127.0.0.1", self.port)
        loads = run_loads(address, "default", info, [load], 1, lambda load: None, seed=next(self.seeds))
        (result,) = asyncio.run(loads)
        return result


@contextmanager
def llama_server(binary: Path, file: Path, threads: int) -> Iterator[LlamaServer]:
    """A server with a slot for each of 16 clients; it ends with the block."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    options = {
        "-m": file,
        "--host": "127.0.0.1",
        "--port": port,
        "-np": _SLOTS,
        "-c": _SLOTS * _SLOT_LEN,
        "-t": threads,
        "-tb": threads,
    }
    words = [str(word) for option in options.items() for word in option]
    process = subprocess.Popen([binary, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_until_healthy(port)
        yield LlamaServer(port)
    finally:
        process.kill()
        process.wait()


def _wait_until_healthy(port: int) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError("llama-server does not answer")
