"""A thread that waits for disks, so that the step loop never does (torch-free)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

Job: TypeAlias = Callable[[], None]


class DiskThread:
    """Does jobs, which raise nothing, one after another. It ends with the process, wherever it is."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[tuple[Job, threading.Event]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Job) -> threading.Event:
        """Have a job done; the event is set when it is."""
        done = threading.Event()
        self._jobs.put((job, done))
        return done

    def _run(self) -> None:
        while True:
            job, done = self._jobs.get()
            job()
            done.set()
