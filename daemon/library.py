"""The models on disk as clients of a daemon change them: fetched, made, copied, deleted, while others run."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncGenerator

import msgspec

from quantd.daemon.blobs import Blobs
from quantd.daemon.errors import StoreError
from quantd.daemon.library_worker import Added, Job, Refused, Report, Step
from quantd.daemon.models import Models
from quantd.daemon.stored_prefixes import StoredPrefixes

# -P: a file of the working directory must not pass for a module of the daemon.
_COMMAND = (sys.executable, "-P", "-m", "quantd.daemon.library_worker")


class Library:
    """The store of a daemon's models, and the blobs that clients have sent."""

    def __init__(self, models: Models, prefixes: StoredPrefixes) -> None:
        self.store = models.store
        self.blobs = Blobs(models.store.root / ".blobs")
        self._models = models
        self._prefixes = prefixes

    async def add(self, job: Job) -> AsyncGenerator[Step]:
        """Do a job; the steps on its way. Closing the generator ends it.

        A model of that name in memory goes once its requests are done. Raises StoreError,
        ModelNotFoundError, CheckpointError, UnsupportedModelError.
        """
        report: Report | None = None
        async for report in _reports(job):
            if isinstance(report, Step):
                yield report
        if isinstance(report, Refused):
            raise report.error()
        if not isinstance(report, Added):
            raise StoreError("the process that adds models ended without a reason; see the daemon's log")
        if job.replace:
            await self._models.retire(report.name)

    async def delete(self, name: str) -> None:
        """Delete a model from disk, with its prefixes, and from memory once its requests are done.

        Raises ModelNotFoundError.
        """
        name = self.store.get(name).name
        await asyncio.to_thread(self.store.remove, name)
        await asyncio.to_thread(self.blobs.prune)
        await self._models.retire(name)
        await asyncio.to_thread(self._prefixes.clear, name)


async def _reports(job: Job) -> AsyncGenerator[Report]:
    """What a process tells of a job. It ends with this generator."""
    environment = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    process = await asyncio.create_subprocess_exec(
        *_COMMAND,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=environment,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(msgspec.json.encode(job) + b"\n")
        async for line in process.stdout:
            yield msgspec.json.decode(line, type=Report)
    finally:
        process.stdin.close()
        await process.wait()
