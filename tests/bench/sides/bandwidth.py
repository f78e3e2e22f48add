"""Read bandwidth of this machine's memory, by a C program that is compiled for the occasion."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

_SOURCE = Path(__file__).with_name("read_bandwidth.c")
_MEBIBYTES = 512
_PASSES = 8


class ReadBandwidth:
    """Compiles on entry. It reads faster than torch's sum of the same memory: it asks for huge pages."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._folder = tempfile.TemporaryDirectory(prefix="quantd-bench-")
        self._program = Path(self._folder.name) / "read_bandwidth"

    def __enter__(self) -> ReadBandwidth:
        flags = ("-O3", "-march=native", "-pthread")
        subprocess.run(["cc", *flags, str(_SOURCE), "-o", str(self._program)], check=True)
        return self

    def __exit__(self, *exc: object) -> None:
        self._folder.cleanup()

    def measure(self) -> float:
        """Bytes a second, of the fastest of a few passes."""
        command = [str(self._program), str(self._threads), str(_MEBIBYTES), str(_PASSES)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return float(done.stdout.split()[0])
