"""A hit from disk gives the same bits as a miss: a small real model, with every cache format and rounding."""

from __future__ import annotations

from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from recording_sampler import RecordingSampler
from torch import Tensor
from waiting import PATIENCE

from quantd.engine.config import EngineConfig
from quantd.engine.disk_cache import FromDisk, open_disk_cache
from quantd.engine.loop import EngineLoop, Incoming
from quantd.engine.messages import Add, Events, FromEngine, Save
from quantd.engine.request import Request, SamplingParams
from quantd.engine.runner import build_runner
from quantd.engine.scheduler import Scheduler

PROMPT = [3 + (11 * place) % 200 for place in range(110)]
OUTPUT_LEN = 4


class Engine:
    """A loaded model with its disk, which ends when it is let go."""

    def __init__(self, **options: Any) -> None:
        config = EngineConfig(**({"kv_memory": 4 << 20, "threads": 1} | options))
        self.runner = build_runner(config, lambda done, total: None)
        self.runner._sampler = self.sampler = RecordingSampler()
        self.inbox: SimpleQueue[Incoming | FromDisk] = SimpleQueue()
        self.sent: list[FromEngine] = []
        self.scheduler = Scheduler(
            config, self.runner.info, open_disk_cache(config, self.runner, self.inbox.put)
        )
        self.loop = EngineLoop(self.scheduler, self.runner, self.inbox, self.sent.append, hold_seconds=0.0)

    def run(self, prompt: list[int] = PROMPT) -> tuple[Tensor, list[int], int]:
        """Logits, tokens, and how many of the prompt's tokens were cached."""
        sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN)
        self.inbox.put(Add(Request(id="it", prompt=prompt, sampling=sampling)))
        events = []
        while not events or events[-1].finish_reason is None:
            self.loop.step()
            events += [e for frame in self.sent if isinstance(frame, Events) for e in frame.events]
            self.sent.clear()
        tokens = [token for event in events for token in event.token_ids]
        return (
            self.sampler.logits_of("it"),
            tokens,
            next(e.num_cached for e in events if e.num_cached is not None),
        )

    def save(self) -> None:
        """Write what it has computed."""
        while self.scheduler.disk._writer is None:
            self.scheduler.disk.turn(self.scheduler.cache)
            self.inbox.put(self.inbox.get(timeout=PATIENCE))
            self.loop.step()
        self.inbox.put(Save(20.0))
        self.loop.step()


@pytest.mark.parametrize(
    ("kv_dtype", "activations", "backend"),
    [(kv, activations, "cpu") for kv in ("int8", "fp16", "bf16", "fp32") for activations in ("auto", "fp32")]
    + [("int8", "auto", "reference")],
)
def test_a_hit_from_disk_gives_the_bits_of_a_miss(
    fixture_folders: dict[str, Path], tmp_path: Path, kv_dtype: str, activations: str, backend: str
) -> None:
    options = {"kv_dtype": kv_dtype, "activations": activations, "backend": backend}
    options |= {"model_path": str(fixture_folders["ct-w8a8-dynamic"])}
    alone, tokens, _ = Engine(**options).run()
    first = Engine(**options, prefix_folder=str(tmp_path))
    first.run()
    first.save()
    again = Engine(**options, prefix_folder=str(tmp_path))
    logits, drawn, num_cached = again.run()
    assert num_cached == 96 and again.scheduler.disk.num_read == 6
    assert torch.equal(logits, alone) and drawn == tokens
    if backend == "reference":
        return  # which is slow
    fork = [*PROMPT[:70], *PROMPT[:25]]
    assert torch.equal(
        Engine(**options, prefix_folder=str(tmp_path)).run(fork)[0], Engine(**options).run(fork)[0]
    )


def test_every_way_to_compute_has_blocks_of_its_own(fixture_folders: dict[str, Path], tmp_path: Path) -> None:
    ways = [
        {"kv_dtype": "int8"},
        {"kv_dtype": "fp16"},
        {"activations": "fp32"},
        {"backend": "reference", "kv_dtype": "fp16"},
        {"block_size": 8},
        {"max_model_len": 128},
    ]
    for number, way in enumerate(ways):
        path = str(fixture_folders["ct-w8a8-dynamic"])
        engine = Engine(model_path=path, prefix_folder=str(tmp_path), **way)
        assert engine.run()[2] == 0, way
        engine.save()
        assert len(list(tmp_path.glob("?" * 32))) == number + 1
        again = Engine(model_path=path, prefix_folder=str(tmp_path), **way)
        size = again.runner.info.block_size
        assert again.run()[2] == (len(PROMPT) - 1) // size * size, way
    other = Engine(model_path=str(fixture_folders["gptqmodel-4b-g32-v2"]), prefix_folder=str(tmp_path))
    assert other.run()[2] == 0


def test_the_number_of_threads_does_not_matter(fixture_folders: dict[str, Path], tmp_path: Path) -> None:
    path = str(fixture_folders["ct-w8a8-dynamic"])
    first = Engine(model_path=path, prefix_folder=str(tmp_path), threads=1)
    alone = first.run()[0]
    first.save()
    logits, _, num_cached = Engine(model_path=path, prefix_folder=str(tmp_path), threads=2).run()
    assert num_cached == 96 and torch.equal(logits, alone)
