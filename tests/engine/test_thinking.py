"""Limits of reasoning: what has to come, and when; in an engine, alone and beside others."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from in_process import InProcessEngine
from model_oracle import random_model
from test_models import TINY
from transformers import LlamaConfig

from quantd.engine.config import EngineConfig
from quantd.engine.request import Request, SamplingParams, ThinkingBudget
from quantd.engine.runner import ModelRunner, build_runner

TOKENIZER = Path(__file__).parents[1] / "data" / "tokenizer" / "tokenizer.json"
OPENING, CLOSING = 100, 101


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("tiny")
    random_model(LlamaConfig(**TINY | {"vocab_size": 520}), seed=3).save_pretrained(folder)
    shutil.copy(TOKENIZER, folder)
    return EngineConfig(model_path=str(folder), kv_dtype="fp32", kv_memory=8 << 20, threads=1)


@pytest.fixture(scope="module")
def runner(config: EngineConfig) -> ModelRunner:
    return build_runner(config, lambda done, total: None)


@pytest.mark.parametrize(
    ("budget", "output", "forced"),
    [
        (ThinkingBudget(0, CLOSING), [], CLOSING),
        (ThinkingBudget(3, CLOSING), [1, 2], None),
        (ThinkingBudget(3, CLOSING), [1, 2, 3], CLOSING),
        (ThinkingBudget(3, CLOSING), [1, 2, 3, CLOSING], None),
        (ThinkingBudget(3, CLOSING), [1, CLOSING, 3, 4, 5], None),
        (ThinkingBudget(0, CLOSING, OPENING), [], None),
        (ThinkingBudget(0, CLOSING, OPENING), [OPENING], CLOSING),
        (ThinkingBudget(2, CLOSING, OPENING), [5, OPENING, 1], None),
        (ThinkingBudget(2, CLOSING, OPENING), [5, OPENING, 1, 2], CLOSING),
        (ThinkingBudget(2, CLOSING, OPENING), [1, 2, 3, 4, OPENING, 1, 2, 3], None),
        (ThinkingBudget(2, CLOSING, OPENING), [1, 2, 3, 4, 5], None),
    ],
)
def test_what_has_to_come(budget: ThinkingBudget, output: list[int], forced: int | None) -> None:
    assert budget.forced(output) == forced


def asking(name: str, prompt: Sequence[int] = (5, 6, 7), **sampling: Any) -> Request:
    params = {"temperature": 1.0, "seed": 1, "max_tokens": 20, "logit_bias": {CLOSING: -100.0}} | sampling
    return Request(id=name, prompt=list(prompt), sampling=SamplingParams(**params))


def test_reasoning_ends_where_it_has_to(config: EngineConfig, runner: ModelRunner) -> None:
    """The tokens before are those of a free answer, whatever the sampling; and nobody else notices."""
    kinds: list[dict[str, Any]] = [{"temperature": 0.0}, {"seed": 3}, {"seed": 4, "repetition_penalty": 2.0}]
    free = [asking(f"free {i}", prompt=(5, 6, i), **kind) for i, kind in enumerate(kinds)]
    limited = [
        asking(f"limited {i}", prompt=(5, 6, i), thinking=ThinkingBudget(6, CLOSING), logprobs=1, **kind)
        for i, kind in enumerate(kinds)
    ]
    alone = InProcessEngine(config, runner).serve_alone(free)
    together = InProcessEngine(config, runner).serve([*free, *limited])
    assert [answer.token_ids for answer in together[:3]] == [answer.token_ids for answer in alone]
    for answer, unlimited in zip(together[3:], alone, strict=True):
        assert answer.token_ids[:6] == unlimited.token_ids[:6]
        assert answer.token_ids.count(CLOSING) == 1 and answer.token_ids[6] == CLOSING
        assert len(answer.token_ids) == 20
        # What is forced is still told as the model sees it.
        assert answer.logprobs[6].token_id == CLOSING and answer.logprobs[6].top[0][0] != CLOSING


def test_a_grammar_follows_what_is_forced(config: EngineConfig, runner: ModelRunner) -> None:
    grammar = f'start: T <[{CLOSING}]> "ok"\nT: /(?s:.*)/'
    request = asking("a", grammar=grammar, thinking=ThinkingBudget(4, CLOSING), stop_token_ids=(2,))
    (answer,) = InProcessEngine(config, runner).serve([request])
    assert answer.finish_reason == "complete" and answer.token_ids[4] == CLOSING, answer
