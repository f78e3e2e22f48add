"""Time to the first token behind a long prefix: computed, read back from disk, and still in memory.

python tests/bench/disk_cache.py [--model FOLDER] [--tokens N] [--runs N]

Each figure is of a new engine process. "disk" finds the files in the system's page cache, "disk, cold" not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from contextlib import aclosing
from pathlib import Path

from quantd.daemon.config import Paths
from quantd.daemon.store import Store
from quantd.engine.client import EngineClient
from quantd.engine.config import EngineConfig
from quantd.engine.request import Request, SamplingParams


async def first_token(client: EngineClient, prompt: list[int]) -> tuple[float, int]:
    """Milliseconds to the first token, and how much of the prompt was cached."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    request = Request(id=str(random.random()), prompt=prompt, sampling=sampling)
    begun, cached = time.perf_counter(), 0
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            cached = event.num_cached or cached
    return 1000 * (time.perf_counter() - begun), cached


def leave_memory(folder: Path) -> None:
    """Have the system drop the files' pages."""
    for path in folder.rglob("?" * 64):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def measure(model: Path, num_tokens: int, number: int, folder: Path) -> dict[str, float]:
    """One prefix, by every way."""
    config = EngineConfig(model_path=str(model), prefix_folder=str(folder), kv_memory=512 << 20)
    generator = random.Random(number)
    prompt = [generator.randrange(3, 30000) for _ in range(num_tokens + 1)]
    warm_up = [generator.randrange(3, 30000) for _ in range(200)]
    times: dict[str, float] = {}
    for name in ("computed", "disk", "disk, cold"):
        client = await EngineClient.start(config)
        await first_token(client, warm_up)
        if name == "disk, cold":
            leave_memory(folder)
        times[name], cached = await first_token(client, prompt)
        assert bool(cached) == (name != "computed"), (name, cached)
        times["memory"], _ = await first_token(client, prompt)
        begun = time.perf_counter()
        await client.close()
        times[f"end after {name}"] = 1000 * (time.perf_counter() - begun)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    model = args.model or Store(Paths.from_env().models).pull("smollm2").path
    with tempfile.TemporaryDirectory() as folder:
        runs = [asyncio.run(measure(model, args.tokens, run, Path(folder))) for run in range(args.runs)]
        size = sum(path.stat().st_size for path in Path(folder).rglob("?" * 64))
    print(f"{args.tokens} tokens, {size / args.runs / 1e6:.0f} MB on disk a run; ms, medians of {args.runs}")
    for name in runs[0]:
        print(f"{name:24}{statistics.median(run[name] for run in runs):9.1f}")


if __name__ == "__main__":
    main()
