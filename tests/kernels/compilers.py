"""Processes in which Triton does not interpret. Nothing here imports it: it looks when it is imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context


@contextmanager
def compilers(num_processes: int) -> Iterator[ProcessPoolExecutor]:
    """So many processes; leaving drops what waits."""
    # Started afresh, not forked: a fork has triton imported already.
    pool = ProcessPoolExecutor(num_processes, get_context("spawn"), _stop_interpreting)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _stop_interpreting() -> None:
    os.environ["TRITON_INTERPRET"] = "0"
