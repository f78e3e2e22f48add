"""A request's logits are the same bits whatever else goes on: the real model, INT8 and fp16 caches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from in_process import Completion, InProcessEngine
from recording_sampler import RecordingSampler
from torch import Tensor

from quantd.engine.config import EngineConfig
from quantd.engine.request import MAX_LOGPROBS, Request, SamplingParams
from quantd.engine.runner import build_runner

VOCAB = 49152
OUTPUT_LEN = 6


class Bench:
    """A loaded model, and schedulers over it with different options."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.sampler = RecordingSampler()
        self.runner = build_runner(config, lambda done, total: None)
        self.runner._sampler = self.sampler

    def run(self, requests: Sequence[Request], **options: Any) -> tuple[Tensor, list[Completion]]:
        """The logits of request "it", and all completions."""
        self.sampler.rows.clear()
        config = msgspec.structs.replace(self.config, **options)
        completions = InProcessEngine(config, self.runner).serve(requests)
        return self.sampler.logits_of("it"), completions


def request(name: str, prompt_len: int, **sampling: Any) -> Request:
    generator = torch.Generator().manual_seed(prompt_len)
    prompt = torch.randint(3, VOCAB, (prompt_len,), generator=generator).tolist()
    params = {"temperature": 0.0, "max_tokens": OUTPUT_LEN} | sampling
    return Request(id=name, prompt=prompt, sampling=SamplingParams(**params))


IT = request("it", 110)


@pytest.fixture(scope="module", params=["int8", "fp16"])
def bench(request: pytest.FixtureRequest, smollm2: Path) -> Bench:
    config = EngineConfig(model_path=str(smollm2), kv_dtype=request.param, kv_memory=64 << 20, threads=1)
    return Bench(config)


@pytest.fixture(scope="module")
def alone(bench: Bench) -> Tensor:
    return bench.run([IT], prefix_caching=False)[0]


@pytest.mark.parametrize("size", [2, 3, 5, 8, 16, 17, 33])
def test_in_a_batch(bench: Bench, alone: Tensor, size: int) -> None:
    others = [request(f"other {i}", 3 + 7 * i % 40, max_tokens=OUTPUT_LEN + i % 3) for i in range(size - 1)]
    place = size // 2
    assert torch.equal(bench.run([*others[:place], IT, *others[place:]])[0], alone)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 100])
def test_in_chunks(bench: Bench, alone: Tensor, chunk: int) -> None:
    assert torch.equal(bench.run([IT], max_num_tokens=chunk)[0], alone)


def test_behind_a_prefix_hit(bench: Bench, alone: Tensor) -> None:
    first = with_id(IT, "first")
    logits, completions = bench.run([first, IT], max_num_requests=1)
    assert completions[1].num_cached == 96
    assert torch.equal(logits, alone)


def test_after_preemption(bench: Bench, alone: Tensor) -> None:
    crowded = InProcessEngine(bench.config, bench.runner, num_blocks=9)
    bench.sampler.rows.clear()
    # The other one grows until the blocks of the later one, which is "it", are needed.
    crowded.serve([request("other", 14, max_tokens=40), IT])
    assert crowded.scheduler.counters.preemptions > 0
    assert torch.equal(bench.sampler.logits_of("it"), alone)


def test_prompt_and_decode(bench: Bench) -> None:
    asked = request("it", 40, logprobs=MAX_LOGPROBS)
    (decoded,) = bench.run([asked], prefix_caching=False)[1]
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=MAX_LOGPROBS)
    again = Request(id="again", prompt=asked.prompt + decoded.token_ids, sampling=params)
    (read,) = InProcessEngine(bench.config, bench.runner).serve([again])
    assert read.prompt_logprobs[-OUTPUT_LEN:] == decoded.logprobs


def test_with_another_number_of_threads(bench: Bench, alone: Tensor) -> None:
    for threads in (2, 3):
        other = Bench(msgspec.structs.replace(bench.config, threads=threads))
        assert torch.equal(other.run([IT])[0], alone)


def with_id(request: Request, name: str) -> Request:
    return msgspec.structs.replace(request, id=name)
