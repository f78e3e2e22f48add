"""Embeddings by the engine: against transformers, of the same bits in any company, in their own form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from in_process import Completion, InProcessEngine
from model_oracle import random_model, relative_error
from test_models import TINY
from torch import Tensor
from transformers import AutoConfig

from quantd.engine.config import EngineConfig
from quantd.engine.errors import ContextLengthError, RequestError
from quantd.engine.request import EmbeddingParams, Request, SamplingParams
from quantd.engine.runner import ModelRunner, build_runner

POOLINGS = ["mean", "last", "first"]


def embedding_requests(prompts: Sequence[list[int]], salt: str = "", **params: Any) -> list[Request]:
    return [
        Request(
            id=f"text {i}",
            prompt=prompt,
            sampling=SamplingParams(max_tokens=0),
            embedding=EmbeddingParams(**params),
            salt=salt,
        )
        for i, prompt in enumerate(prompts)
    ]


def vector(completion: Completion) -> Tensor:
    assert completion.embedding is not None, completion.error
    return torch.from_numpy(np.frombuffer(completion.embedding, "<f4").copy())


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model_path=str(folder), **({"kv_memory": 8 << 20, "threads": 1} | options))


def build(config: EngineConfig) -> ModelRunner:
    return build_runner(config, lambda done, total: None)


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed + 1000 * length)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2"])
def test_vectors_are_pooled_hidden_states_of_transformers(
    tmp_path: Path, model_type: str, pooling: str
) -> None:
    model = random_model(AutoConfig.for_model(model_type, **TINY), seed=5)
    model.save_pretrained(tmp_path)
    config = config_of(tmp_path, kv_dtype="fp32", activations="fp32", max_num_tokens=19)
    prompts = [prompt_of(length, TINY["vocab_size"]) for length in (1, 16, 70)]
    runner = build(config)
    for normalize, dimensions in ((True, None), (True, 24), (False, 24), (False, None)):
        params = {"pooling": pooling, "normalize": normalize, "dimensions": dimensions}
        embedded = InProcessEngine(config, runner).serve(embedding_requests(prompts, **params))
        for prompt, completion in zip(prompts, embedded, strict=True):
            with torch.inference_mode():
                hidden = model.model(torch.tensor([prompt])).last_hidden_state[0]
            pooled = {"mean": hidden.mean(0), "last": hidden[-1], "first": hidden[0]}[pooling]
            expected = pooled[:dimensions]
            expected = expected / expected.norm() if normalize else expected
            assert relative_error(vector(completion), expected) < 1e-4


FIXTURE = "gptqmodel-4b-g32-v2"
VOCAB = 512


@pytest.fixture(scope="module")
def config(fixture_folders: dict[str, Path]) -> EngineConfig:
    return config_of(fixture_folders[FIXTURE])


@pytest.fixture(scope="module")
def runner(config: EngineConfig) -> ModelRunner:
    return build(config)


def embed(runner: ModelRunner, config: EngineConfig, request: Request, **options: Any) -> Completion:
    engine = InProcessEngine(msgspec.structs.replace(config, **options), runner)
    return engine.serve([request])[0]


@pytest.mark.parametrize("pooling", POOLINGS)
class TestSameBits:
    """A text of 110 tokens, with an INT8 cache."""

    @staticmethod
    def request(pooling: str, name: str = "it") -> Request:
        (made,) = embedding_requests([prompt_of(110, VOCAB)], pooling=pooling)
        return msgspec.structs.replace(made, id=name)

    def test_in_chunks(self, runner: ModelRunner, config: EngineConfig, pooling: str) -> None:
        alone = embed(runner, config, self.request(pooling)).embedding
        for chunk in (1, 7, 16, 64, 109):
            assert embed(runner, config, self.request(pooling), max_num_tokens=chunk).embedding == alone

    def test_beside_others(self, runner: ModelRunner, config: EngineConfig, pooling: str) -> None:
        alone = embed(runner, config, self.request(pooling)).embedding
        texts = embedding_requests([prompt_of(n, VOCAB) for n in range(3, 60, 9)], pooling=pooling)
        talk = [
            Request(id=f"talk {n}", prompt=prompt_of(n, VOCAB), sampling=SamplingParams(max_tokens=9, seed=n))
            for n in (5, 40, 90)
        ]
        for num_tokens in (33, 512):
            busy = msgspec.structs.replace(config, max_num_tokens=num_tokens)
            served = InProcessEngine(busy, runner).serve([*talk[:2], *texts, self.request(pooling), talk[2]])
            assert served[-2].embedding == alone
            assert [len(completion.token_ids) for completion in (*served[:2], served[-1])] == [9, 9, 9]

    def test_behind_a_cached_prefix(self, runner: ModelRunner, config: EngineConfig, pooling: str) -> None:
        alone = embed(runner, config, self.request(pooling), prefix_caching=False).embedding
        engine = InProcessEngine(config, runner)
        sampling = SamplingParams(max_tokens=3, seed=1)
        engine.serve([Request(id="chat", prompt=prompt_of(110, VOCAB)[:100], sampling=sampling)])
        for name, cached in (("first", 96), ("second", 96)):
            (completion,) = engine.serve([self.request(pooling, name)])
            assert completion.embedding == alone
            assert completion.num_cached == (cached if pooling == "last" else 0)

    def test_after_preemption(self, runner: ModelRunner, config: EngineConfig, pooling: str) -> None:
        alone = embed(runner, config, self.request(pooling)).embedding
        slow = msgspec.structs.replace(config, max_num_tokens=4)
        crowded = InProcessEngine(slow, runner, num_blocks=9)
        sampling = SamplingParams(max_tokens=60, temperature=0.0)
        talk = Request(id="talk", prompt=prompt_of(14, VOCAB), sampling=sampling)
        assert crowded.serve([talk, self.request(pooling)])[1].embedding == alone
        assert crowded.scheduler.counters.preemptions > 0


def test_texts_leave_the_prefixes_of_others_alone(runner: ModelRunner, config: EngineConfig) -> None:
    """Ten times what the pool holds goes through; a conversation's blocks are there afterwards."""
    engine = InProcessEngine(config, runner, num_blocks=16)
    chat = Request(id="chat", prompt=prompt_of(70, VOCAB), sampling=SamplingParams(max_tokens=2))
    engine.serve([chat])
    texts = [prompt_of(80, VOCAB, seed) for seed in range(32)]
    assert all(completion.embedding for completion in engine.serve(embedding_requests(texts)))
    assert engine.serve([msgspec.structs.replace(chat, id="again")])[0].num_cached == 64


def test_an_aborted_text_holds_nothing(runner: ModelRunner, config: EngineConfig) -> None:
    slow = msgspec.structs.replace(config, max_num_tokens=16)
    engine = InProcessEngine(slow, runner)
    for request in embedding_requests([prompt_of(100, VOCAB)]):
        engine.scheduler.add(request)
    engine.step()
    event = engine.scheduler.abort("text 0")
    assert event is not None and event.embedding is None
    engine.scheduler.check()
    assert engine.scheduler.stats().blocks_free == runner.info.num_blocks


def test_a_text_may_fill_the_context(runner: ModelRunner, config: EngineConfig) -> None:
    limit = runner.info.max_request_len
    full, over = embedding_requests([prompt_of(limit, VOCAB), prompt_of(limit + 1, VOCAB)])
    assert embed(runner, config, full).embedding is not None
    with pytest.raises(ContextLengthError, match=rf"has {limit + 1} tokens, but the .* is {limit}$"):
        runner.info.check_request(over)


@pytest.mark.parametrize("dimensions", [0, -1, 129])
def test_dimensions_that_the_model_has_not_are_refused(runner: ModelRunner, dimensions: int) -> None:
    (request,) = embedding_requests([[5]], dimensions=dimensions)
    with pytest.raises(RequestError, match=rf"between 1 and the model's 128, got {dimensions}") as refused:
        runner.info.check_request(request)
    assert refused.value.param == "dimensions"
