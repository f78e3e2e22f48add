"""quantd measured: an engine in this process, a fresh engine process, a daemon. Rates in tokens a second."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantd.daemon.bench.loads import Load
from quantd.daemon.bench.results import Result
from quantd.daemon.bench.session import run_loads
from quantd.daemon.cli.client import DaemonClient
from quantd.daemon.cli.control import load_model
from quantd.daemon.cli.spawn import own_daemon
from quantd.daemon.config import Paths
from quantd.engine.client import EngineClient
from quantd.engine.config import EngineConfig
from quantd.engine.messages import ModelInfo
from quantd.engine.request import Request, SamplingParams, TokenEvent
from quantd.engine.runner import build_runner
from quantd.engine.scheduler import Scheduler

_KV_MEMORY = 1 << 29


class Engine:
    """A model in this process: the scheduler around its runner. options: fields of EngineConfig."""

    name = "quantd"

    def __init__(self, folder: Path, **options: Any) -> None:
        config = EngineConfig(model_path=str(folder), **({"kv_memory": _KV_MEMORY} | options))
        self._runner = build_runner(config, lambda done, total: None)
        self._scheduler = Scheduler(config, self._runner.info)
        self._ids = itertools.count()

    @property
    def info(self) -> ModelInfo:
        return self._runner.info

    def prefill_rate(self, prompt: Sequence[int]) -> float:
        """Of a prompt that is new, up to its first token."""
        begun = time.perf_counter()
        (moment,) = self._moments(prompt, 1, salt=str(begun))
        return len(prompt) / (moment - begun)

    def decode_rate(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Of num_tokens after the first one. The prompt's own time does not count, nor if it is cached."""
        moments = self._moments(prompt, num_tokens + 1)
        return num_tokens / (moments[-1] - moments[0])

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        """Natural logarithms, of every token but the first."""
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        events = (event for _, event in self._serve(prompt, sampling))
        return [entry.logprob for event in events for entry in event.prompt_logprobs]

    def _moments(self, prompt: Sequence[int], num_tokens: int, salt: str = "") -> list[float]:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        return [moment for moment, event in self._serve(prompt, sampling, salt) if event.token_ids]

    def _serve(
        self, prompt: Sequence[int], sampling: SamplingParams, salt: str = ""
    ) -> Iterator[tuple[float, TokenEvent]]:
        """One request to its end: its events and when they came."""
        request = Request(id=str(next(self._ids)), prompt=list(prompt), sampling=sampling, salt=salt)
        refused = self._scheduler.add(request)
        assert refused is None, refused
        while self._scheduler.has_work:
            plan = self._scheduler.schedule()
            for event in self._scheduler.update(plan, self._runner.run(plan)):
                assert event.error is None, event
                yield time.perf_counter(), event


def perplexity(engine: Engine, windows: Sequence[Sequence[int]]) -> float:
    """Of all tokens but the first of each window."""
    logprobs = [value for window in windows for value in engine.prompt_logprobs(window)]
    return math.exp(-math.fsum(logprobs) / len(logprobs))


@dataclass(frozen=True)
class FreshEngine:
    """An engine process from its start: seconds to its first token, and bytes of memory after the request."""

    first_token: float
    resident: int
    weights: int
    kv_written: int


def start_engine(folder: Path, prompt: Sequence[int], num_tokens: int) -> FreshEngine:
    """Start an engine process, have it answer one request, look at its memory, and end it."""
    return asyncio.run(_start_engine(folder, prompt, num_tokens))


async def _start_engine(folder: Path, prompt: Sequence[int], num_tokens: int) -> FreshEngine:
    begun = time.perf_counter()
    client = await EngineClient.start(EngineConfig(model_path=str(folder), kv_memory=_KV_MEMORY))
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
        events = client.generate(Request(id="only", prompt=list(prompt), sampling=sampling))
        moments = [time.perf_counter() async for _ in events]
        info = client.info
        num_blocks = -(-(len(prompt) + num_tokens - 1) // info.block_size)
        return FreshEngine(
            first_token=moments[0] - begun,
            resident=_resident(client.pid),
            weights=info.weight_bytes,
            kv_written=num_blocks * info.block_size * info.kv_bytes_per_token,
        )
    finally:
        await client.close()


def _resident(pid: int) -> int:
    """Bytes of a process that are in memory, libraries included (proc(5), VmRSS)."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@dataclass(frozen=True)
class Daemon:
    """A daemon with one model loaded."""

    client: DaemonClient
    model: str
    info: ModelInfo

    def run(self, load: Load) -> Result:
        """One pass over its socket."""
        loads = run_loads(self.client.address, self.model, self.info, [load], 1, lambda load: None)
        (result,) = asyncio.run(loads)
        return result


@contextmanager
def daemon(model: str) -> Iterator[Daemon]:
    """A daemon of its own on a Unix socket, over the store of $QUANTD_HOME; it ends with the block."""
    with own_daemon(Paths.from_env().log) as client:
        yield Daemon(client, model, load_model(client, model, {"kv_memory": _KV_MEMORY}))
