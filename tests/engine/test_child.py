"""A process that is started for this one: what a start leaves that is given up."""

from __future__ import annotations

import asyncio
import sys

import psutil
import pytest
from processes import children_of

from quantd.engine.child import Child

MARK = "not-seen-elsewhere"
COMMAND = (sys.executable, "-c", "import time; time.sleep(60)", MARK)


def test_a_start_that_is_given_up_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the process is there, and nothing is connected to it yet."""
    seen: list[psutil.Process] = []

    async def give_up() -> None:
        begun = asyncio.Event()

        async def connect(**kwargs: object) -> None:
            seen.extend(children_of(psutil.Process(), MARK))
            begun.set()
            await asyncio.Event().wait()

        monkeypatch.setattr("asyncio.open_unix_connection", connect)
        starting = asyncio.create_task(Child.start(COMMAND))
        await begun.wait()
        starting.cancel()
        await asyncio.wait({starting})
        assert starting.cancelled()

    asyncio.run(give_up())
    assert len(seen) == 1 and not seen[0].is_running()
