"""How much of the KV memory that requests hold has tokens in it: `python tests/bench/kv_utilisation.py`.

A mixed load goes through the real scheduler; the model is not needed, for only lengths matter. The
load is in the shape of chat traffic: lognormal prompt and output lengths, arrivals at random over
time, a pool that fills so that requests wait and are preempted. Averages are over time, in steps.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from quantd.engine.config import EngineConfig
from quantd.engine.messages import ModelInfo
from quantd.engine.plan import EntryOutput, Plan, StepOutput
from quantd.engine.request import Request, SamplingParams
from quantd.engine.scheduler import Scheduler

MAX_LEN = 2048
VOCAB_SIZE = 32000


@dataclass
class Utilisation:
    """Sums over all steps of a load, in slots; what preallocation would hold is MAX_LEN for each request."""

    num_requests: int
    block_size: int
    num_steps: int = 0
    num_preemptions: int = 0
    live: int = 0
    allocated: int = 0
    preallocated: int = 0

    @property
    def paged(self) -> float:
        return self.live / self.allocated

    @property
    def whole_length(self) -> float:
        return self.live / self.preallocated


def measure(
    num_requests: int = 200, block_size: int = 16, num_blocks: int = 1024, seed: int = 0
) -> Utilisation:
    """Run a load of `num_requests` to its end."""
    info = _info(num_blocks, block_size)
    scheduler = Scheduler(EngineConfig(model_path=""), info)
    arrivals = _load(num_requests, random.Random(seed))
    result = Utilisation(num_requests, block_size)
    while arrivals or scheduler.has_work:
        while arrivals and arrivals[0][0] <= result.num_steps:
            assert scheduler.add(arrivals.pop(0)[1]) is None
        if scheduler.has_work:
            plan = scheduler.schedule()
            scheduler.update(plan, _answer(plan))
            _count(scheduler, result)
        result.num_steps += 1
    result.num_preemptions = scheduler.stats().preemptions
    return result


def _count(scheduler: Scheduler, result: Utilisation) -> None:
    """Add up the slots of a step. A block that several requests share counts once."""
    size = scheduler.info.block_size
    live = {
        block: min(state.num_computed - index * size, size)
        for state in scheduler.running
        for index, block in enumerate(state.blocks)
    }
    result.live += sum(live.values())
    result.allocated += len(live) * size
    result.preallocated += len(scheduler.running) * MAX_LEN


def _load(num_requests: int, rng: random.Random) -> list[tuple[int, Request]]:
    """(step of arrival, request), in order of arrival: on average one in 12 steps."""
    arrivals, step = [], 0.0
    for number in range(num_requests):
        step += rng.expovariate(1 / 12)
        prompt_len = min(_lognormal(rng, median=250), MAX_LEN // 2)
        output_len = min(_lognormal(rng, median=150), MAX_LEN - prompt_len)
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(prompt_len)]
        request = Request(id=f"{number}", prompt=prompt, sampling=SamplingParams(max_tokens=output_len))
        arrivals.append((math.floor(step), request))
    return arrivals


def _lognormal(rng: random.Random, median: int) -> int:
    return 1 + int(rng.lognormvariate(math.log(median), 0.9))


def _answer(plan: Plan) -> StepOutput:
    return StepOutput(tuple(EntryOutput([0] if entry.samples else []) for entry in plan.entries))


def _info(num_blocks: int, block_size: int) -> ModelInfo:
    return ModelInfo(
        architecture="none",
        backend="none",
        vocab_size=VOCAB_SIZE,
        hidden_size=1,
        max_model_len=MAX_LEN,
        weight_bytes=0,
        kv_dtype="int8",
        kv_bytes=num_blocks * block_size,
        kv_bytes_per_token=1,
        block_size=block_size,
        num_blocks=num_blocks,
        load_seconds=0.0,
    )


def main() -> None:
    result = measure()
    print(f"{result.num_requests} requests, {result.num_steps} steps, {result.num_preemptions} preemptions")
    print(f"blocks of {result.block_size}: {result.paged:.1%} of the allocated slots hold live tokens")
    print(f"{MAX_LEN} slots for each request: {result.whole_length:.1%}")


if __name__ == "__main__":
    main()
