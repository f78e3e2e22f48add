"""A model folder served through the scheduler: exactness, log probabilities, faults, sizes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from in_process import Completion, InProcessEngine
from safetensors.torch import load_file, save_file
from torch import Tensor

from quantd.engine.config import EngineConfig
from quantd.engine.errors import CapacityError, NumericsError
from quantd.engine.request import MAX_LOGPROBS, EmbeddingParams, Request, SamplingParams
from quantd.engine.runner import ModelRunner, build_runner

MODEL = "autogptq-4b-g32-sym"
WEIGHTS = "gptq_model-4bit-32g.safetensors"
VOCAB = 512


def config_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model_path=str(folder), **({"kv_memory": 4 << 20, "threads": 1} | options))


def build(config: EngineConfig) -> ModelRunner:
    return build_runner(config, lambda done, total: None)


def request(name: str, prompt: list[int], **sampling: Any) -> Request:
    return Request(id=name, prompt=prompt, sampling=SamplingParams(**({"max_tokens": 1} | sampling)))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


Serve = Callable[..., list[Completion]]


@pytest.fixture(scope="module")
def runner(fixture_folders: dict[str, Path]) -> ModelRunner:
    return build(config_of(fixture_folders[MODEL]))


@pytest.fixture
def serve(runner: ModelRunner, fixture_folders: dict[str, Path]) -> Serve:
    """Requests through a new scheduler over the module's runner."""

    def serve(requests: list[Request], alone: bool = False, **options: Any) -> list[Completion]:
        engine = InProcessEngine(config_of(fixture_folders[MODEL], **options), runner)
        return engine.serve_alone(requests) if alone else engine.serve(requests)

    return serve


@pytest.mark.parametrize(
    ("name", "activations", "tolerance"),
    [
        ("autogptq-3b-g32-sym", "fp32", 2e-3),
        ("autogptq-4b-g32-sym", "fp32", 2e-3),
        ("autogptq-4b-g32-sym-desc", "fp32", 2e-3),
        ("autogptq-8b-gm1-asym", "fp32", 2e-3),
        ("gptqmodel-4b-g32-v2", "fp32", 2e-3),
        # Its inputs are rounded to INT8, where the last bit decides ties; see test_models_fixtures.py.
        ("ct-w8a8-dynamic", "auto", 1.5e-2),
    ],
)
def test_fixtures_give_their_expected_log_probabilities(
    fixture_folders: dict[str, Path], name: str, activations: str, tolerance: float
) -> None:
    expected = load_file(fixture_folders[name] / "expected.safetensors")
    logprobs = expected["logits"].log_softmax(-1)
    config = config_of(fixture_folders[name], kv_dtype="fp32", activations=activations, max_num_tokens=40)
    prompts = expected["input_ids"].tolist()
    requests = [request(f"r{i}", p, prompt_logprobs=MAX_LOGPROBS) for i, p in enumerate(prompts)]
    for row, prompt, completion in zip(
        logprobs, prompts, InProcessEngine(config, build(config)).serve(requests), strict=True
    ):
        assert [entry.token_id for entry in completion.prompt_logprobs] == prompt[1:]
        ours = torch.tensor([entry.logprob for entry in completion.prompt_logprobs])
        theirs = row[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        assert relative_error(ours, theirs) < tolerance
        for position, entry in enumerate(completion.prompt_logprobs):
            ids, values = zip(*entry.top, strict=True)
            assert relative_error(torch.tensor(values), row[position, list(ids)]) < tolerance


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def mixed_requests() -> list[Request]:
    """Greedy and drawn, short and long, some with a common prefix."""
    common = prompt_of(40)
    asked: list[tuple[list[int], dict[str, Any]]] = [
        (prompt_of(3, 1), {"temperature": 0.0}),
        (common + prompt_of(5, 2), {"seed": 1}),
        (common + prompt_of(9, 3), {"seed": 2, "top_k": 20, "top_p": 0.9}),
        (prompt_of(70, 4), {"temperature": 0.0, "repetition_penalty": 1.3}),
        (common, {"seed": 3, "min_p": 0.05}),
        (prompt_of(17, 5), {"seed": 4, "frequency_penalty": 0.5, "presence_penalty": 0.5}),
    ]
    return [
        request(f"r{i}", prompt, max_tokens=40, logprobs=3, **sampling)
        for i, (prompt, sampling) in enumerate(asked)
    ]


def test_a_request_is_the_same_alone_and_in_any_company(serve: Serve) -> None:
    requests = mixed_requests()
    alone = serve(requests, alone=True, prefix_caching=False)
    assert [len(c.token_ids) for c in alone] == [40] * len(requests)
    together = serve(requests, max_num_tokens=24)
    assert any(c.num_cached for c in together)
    for a, b in zip(alone, together, strict=True):
        assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)


def test_a_preempted_request_goes_on_as_if_nothing_had_been(fixture_folders: dict[str, Path]) -> None:
    small = config_of(fixture_folders[MODEL], kv_memory=50 << 10, max_model_len=128)
    runner = build(small)
    assert runner.info.num_blocks == 10
    requests = mixed_requests()
    alone = InProcessEngine(small, runner).serve_alone(requests)
    crowded = InProcessEngine(small, runner)
    together = crowded.serve(requests)
    assert crowded.scheduler.counters.preemptions > 0
    for a, b in zip(alone, together, strict=True):
        assert (a.token_ids, a.logprobs) == (b.token_ids, b.logprobs)


@pytest.mark.parametrize("length", [63, 64, 65])
def test_prompt_logprobs_are_the_same_cold_warm_and_in_chunks(
    serve: Serve, runner: ModelRunner, length: int
) -> None:
    """Case c15: positions asked for are computed again, whatever the prefix cache holds."""
    asking = request("asking", prompt_of(length), prompt_logprobs=2, logprobs=2, temperature=0.0)
    warming = request("warming", prompt_of(length))
    (cold,) = serve([asking], prefix_caching=False)
    _, warm = serve([warming, asking], max_num_requests=1)
    (chunked,) = serve([asking], max_num_tokens=13)
    assert [entry.token_id for entry in cold.prompt_logprobs] == prompt_of(length)[1:]
    assert (cold.prompt_logprobs, cold.logprobs) == (warm.prompt_logprobs, warm.logprobs)
    assert (cold.prompt_logprobs, cold.logprobs) == (chunked.prompt_logprobs, chunked.logprobs)


def test_prompt_logprobs_of_many_positions_and_none_of_one(serve: Serve) -> None:
    long, short = serve(
        [request("long", prompt_of(200), prompt_logprobs=0), request("short", [7], prompt_logprobs=0)]
    )
    assert [entry.token_id for entry in long.prompt_logprobs] == prompt_of(200)[1:]
    assert short.prompt_logprobs == []


def damaged(folder: Path, copy: Path, tensor: str, where: Any) -> Path:
    """A copy of the model with NaN in a tensor."""
    shutil.copytree(folder, copy)
    tensors = load_file(copy / WEIGHTS)
    tensors[tensor][where] = torch.nan
    save_file(tensors, copy / WEIGHTS, metadata={"format": "pt"})
    return copy


def test_a_request_that_meets_nan_fails_alone(fixture_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = damaged(fixture_folders[MODEL], tmp_path / "model", "model.embed_tokens.weight", 400)
    config = config_of(folder)
    runner = build(config)
    good = request("good", [5, 6, 7], max_tokens=10, temperature=0.0)
    bad = request("bad", [5, 400, 7], max_tokens=10)
    bad_prompt = request("bad prompt", [9, 400, 7], max_tokens=10, prompt_logprobs=1)
    alone = InProcessEngine(config, runner).serve([good])
    bad_text = Request(id="bad text", prompt=[8, 400], sampling=SamplingParams(max_tokens=0))
    bad_text = msgspec.structs.replace(bad_text, embedding=EmbeddingParams())
    together = InProcessEngine(config, runner).serve([bad, good, bad_prompt, bad_text])
    assert together[1] == alone[0]
    for completion in (together[0], *together[2:]):
        assert completion.finish_reason == "error"
        assert completion.error is not None and "not finite" in completion.error


def test_nan_in_the_first_forward_stops_the_load_and_names_the_layer(
    fixture_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = damaged(
        fixture_folders[MODEL], tmp_path / "model", "model.layers.1.mlp.down_proj.scales", (0, 0)
    )
    with pytest.raises(NumericsError, match="layer 1"):
        build(config_of(folder))


def test_info_says_what_was_loaded(runner: ModelRunner) -> None:
    info = runner.info
    assert (info.architecture, info.vocab_size, info.max_model_len) == ("llama", VOCAB, 256)
    # 2 layers, keys and values, 4 heads of 16 bytes and a 4-byte scale.
    assert (info.kv_dtype, info.kv_bytes_per_token) == ("int8", 2 * 2 * 4 * (16 + 4))
    assert info.kv_bytes == info.num_blocks * 16 * info.kv_bytes_per_token <= 4 << 20
    # 4-bit matrices and fp16 embeddings; no backend may keep them as float32.
    assert 200_000 < info.weight_bytes < 800_000
    assert info.load_seconds > 0


@pytest.mark.parametrize("kv_dtype", ["fp16", "bf16", "fp32", "int8"])
def test_every_kv_format_serves(fixture_folders: dict[str, Path], kv_dtype: str) -> None:
    config = config_of(fixture_folders[MODEL], kv_dtype=kv_dtype, kv_memory=None, max_model_len=64)
    runner = build(config)
    assert runner.info.num_blocks == config.max_num_requests * 4
    (completion,) = InProcessEngine(config, runner).serve([request("r", prompt_of(30), max_tokens=None)])
    assert len(completion.token_ids) == 64 - 30
    assert completion.finish_reason == "length"


def test_a_pool_without_room_for_a_block_is_refused(fixture_folders: dict[str, Path]) -> None:
    with pytest.raises(CapacityError, match="kv_memory"):
        build(config_of(fixture_folders[MODEL], kv_memory=100))


def test_progress_reaches_the_end(fixture_folders: dict[str, Path]) -> None:
    calls: list[tuple[int, int]] = []
    build_runner(config_of(fixture_folders[MODEL]), lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] > 0
