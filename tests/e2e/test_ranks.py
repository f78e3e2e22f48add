"""Ranks as processes: the answers of one rank, and clean ends whichever process is killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import openai
import psutil
import pytest
import torch
from homes import add_tiny
from in_process import Completion, InProcessEngine
from processes import own_children
from safetensors.torch import load_file, save_file
from test_daemon import DATA, STORY, serve, wait_for_text
from waiting import run_steadily, until

from quantd.engine.client import ENGINE_COMMAND, EngineClient
from quantd.engine.config import EngineConfig
from quantd.engine.errors import EngineDiedError, NumericsError, RankError, RequestError
from quantd.engine.leading import LeadingRunner
from quantd.engine.rank_messages import RankReady
from quantd.engine.ranks import Ranks
from quantd.engine.request import EmbeddingParams, Pooling, Request, SamplingParams, TokenLogprob
from quantd.engine.runner import build_runner
from quantd.engine.split import World

EXACT = {"kv_dtype": "fp32", "activations": "fp32"}


@dataclass(frozen=True)
class Case:
    """A checkpoint, how it is dealt out, and whether that leaves every bit as it was."""

    fixture: str
    ranks: dict[str, Any]
    options: dict[str, Any]
    same_bits: bool = False

    def config(self, **ranks: Any) -> EngineConfig:
        path = str(DATA / "fixtures" / self.fixture)
        return EngineConfig(model_path=path, kv_memory=4 << 20, threads=1, **self.options, **ranks)


CASES = {
    "tp 4, act-order": Case("autogptq-4b-g32-sym-desc", {"tp": 4}, EXACT),
    "tp 2, W8A8": Case("ct-w8a8-dynamic", {"tp": 2}, EXACT),
    "tp 2 of two stages, 8 bit": Case("autogptq-8b-gm1-asym", {"tp": 2, "split": "auto"}, EXACT),
    # As users run it: INT8 inputs and an INT8 cache.
    "two stages": Case("gptqmodel-4b-g32-v2", {"split": "1,1"}, {}, same_bits=True),
}


def requests() -> list[Request]:
    """Long enough for several micro-batches; two begin alike, so that one may find the other's blocks."""
    prompts = [[(7 * i + k * k) % 500 + 3 for k in range(length)] for i, length in enumerate((150, 9, 60))]
    prompts.append([*prompts[0][:100], 17])
    sampling = SamplingParams(temperature=0.0, max_tokens=24, logprobs=20, prompt_logprobs=3)
    return [Request(id=f"r{i}", prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]


def texts() -> list[Request]:
    """To embed."""
    poolings: tuple[Pooling, ...] = ("mean", "last", "first")
    return [
        Request(
            id=f"t{i}",
            prompt=[(11 * i + k) % 500 + 3 for k in range(70)],
            sampling=SamplingParams(max_tokens=0),
            embedding=EmbeddingParams(pooling=pooling),
        )
        for i, pooling in enumerate(poolings)
    ]


def vectors(completions: list[Completion]) -> list[float]:
    return [value for done in completions for value in memoryview(done.embedding or b"").cast("f")]


def logprobs(completion: Completion) -> list[float]:
    entries: list[TokenLogprob] = completion.prompt_logprobs + completion.logprobs
    return [value for entry in entries for value in (entry.logprob, *(likely for _, likely in entry.top))]


@pytest.mark.parametrize("name", CASES)
def test_ranks_answer_as_one_does(name: str) -> None:
    case = CASES[name]
    runner = build_runner(case.config(**case.ranks), lambda done, total: None)
    assert isinstance(runner, LeadingRunner)
    try:
        served = InProcessEngine(case.config(), runner).serve([*requests(), *texts()])
        assert not runner.prepare()  # there are no graphs on a CPU, as every rank says
    finally:
        runner.close()
    assert own_children() == []
    whole = build_runner(case.config(), lambda done, total: None)
    alone = InProcessEngine(case.config(), whole).serve(requests())
    embedded = InProcessEngine(case.config(), whole).serve(texts())
    together, also_embedded = served[: len(alone)], served[len(alone) :]
    assert runner.info.num_blocks == whole.info.num_blocks
    assert runner.info.kv_bytes_per_token == whole.info.kv_bytes_per_token
    assert [c.token_ids for c in together] == [c.token_ids for c in alone]
    assert {len(c.token_ids) for c in alone} == {24}
    for ours, theirs in zip(together, alone, strict=True):
        if case.same_bits:
            assert ours == theirs
        else:
            assert logprobs(ours) == pytest.approx(logprobs(theirs), rel=1e-5, abs=1e-5)
    assert len(vectors(embedded)) == 3 * whole.info.hidden_size
    assert vectors(also_embedded) == pytest.approx(
        vectors(embedded), rel=0, abs=0 if case.same_bits else 1e-5
    )


CONFIG = CASES["tp 4, act-order"].config(tp=2)
LONG = Request(id="long", prompt=[5, 6, 7], sampling=SamplingParams(max_tokens=2000))

Scenario = Callable[[], Coroutine[Any, Any, None]]


def run(test: Scenario) -> Callable[[], None]:
    """A coroutine as a test."""

    def wrapped() -> None:
        run_steadily(test())

    wrapped.__name__ = test.__name__
    return wrapped


@asynccontextmanager
async def running(
    config: EngineConfig = CONFIG, command: Sequence[str] = ENGINE_COMMAND
) -> AsyncIterator[tuple[EngineClient, list[psutil.Process]]]:
    """An engine and its ranks but the first, none of which may be left."""
    client = await EngineClient.start(config, command=command)
    engine = psutil.Process(client.pid)
    ranks = engine.children()
    assert len(ranks) == client.info.num_ranks - 1
    try:
        yield client, ranks
    finally:
        await client.close()
        assert_gone([engine, *ranks])


def assert_gone(processes: list[psutil.Process]) -> None:
    def gone(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    until(lambda: all(map(gone, processes)), "the processes end")


@run
async def test_a_rank_killed_in_a_step_ends_the_engine_with_the_reason() -> None:
    async with running(CASES["tp 4, act-order"].config(tp=4)) as (client, ranks):
        async with aclosing(client.generate(LONG)) as stream:
            await anext(stream)
            os.kill(ranks[1].pid, signal.SIGKILL)
            with pytest.raises(EngineDiedError, match="rank 2 was ended by SIGKILL"):
                async for _ in stream:
                    pass
        assert_gone(ranks)


# An engine whose rank 1 finds no memory for the first steps that it is asked about.
SHORT_RANK = """
import sys
from unittest.mock import patch
import torch
from quantd.engine.model_part import ModelPart
from quantd.engine.worker import serve

asked, shortage = [], ModelPart.shortage

def short(part, num_bytes):
    asked.append(num_bytes)
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
    with patch("torch.empty", side_effect=error if len(asked) < 5 else None):
        return shortage(part, num_bytes)

ModelPart.shortage = short
serve(int(sys.argv[1]))
"""
SHORT_ENGINE = f"""
import sys
from quantd.engine import loop, ranks

ranks.RANK_COMMAND = (sys.executable, "-P", "-c", {SHORT_RANK!r})
loop.serve(int(sys.argv[1]), loop._build_runner)
"""


@run
async def test_a_rank_without_memory_for_a_step_ends_nothing() -> None:
    async def serve(client: EngineClient) -> list[list[int]]:
        return await asyncio.gather(*(collect(client, request) for request in requests()))

    async def collect(client: EngineClient, request: Request) -> list[int]:
        return [token async for event in client.generate(request) for token in event.token_ids]

    async with running(command=(sys.executable, "-P", "-c", SHORT_ENGINE)) as (client, _):
        first = await serve(client)
        assert await serve(client) == first
        assert {len(tokens) for tokens in first} == {24}
        assert not client.died.done()


@run
async def test_a_rank_killed_while_nothing_runs_is_noticed() -> None:
    async with running() as (client, ranks):
        os.kill(ranks[0].pid, signal.SIGKILL)
        assert "rank 1 was ended by SIGKILL" in await client.died


@run
async def test_ranks_do_not_outlive_a_killed_engine() -> None:
    async with running() as (client, ranks), aclosing(client.generate(LONG)) as stream:
        await anext(stream)
        os.kill(client.pid, signal.SIGKILL)
        assert_gone(ranks)


@run
async def test_closing_in_a_step_ends_all_ranks() -> None:
    async with running() as (client, _), aclosing(client.generate(LONG)) as stream:
        await anext(stream)


@run
async def test_a_cancelled_load_leaves_no_rank() -> None:
    loading = asyncio.Event()
    task = asyncio.create_task(EngineClient.start(CONFIG, lambda *_: loading.set()))
    await loading.wait()
    processes = own_children()
    assert len(processes) == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert_gone(processes)


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ({"tp": 16}, "tp 16 is more than the 8 query heads"),
        ({"split": "1,1,1"}, "3 stages, but the model has 2 layers"),
        ({"split": "most"}, "split is 'most'"),
        ({"tp": 0}, "tp is 0"),
    ],
)
def test_what_a_model_cannot_be_dealt_out_to_is_refused(ranks: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        build_runner(CASES["tp 4, act-order"].config(**ranks), lambda done, total: None)
    assert own_children() == []


def test_what_another_rank_finds_wrong_is_told_as_its_own_kind_of_error(tmp_path: Path) -> None:
    """NaN in the last layer, which rank 1 holds."""
    folder = tmp_path / "model"
    shutil.copytree(CONFIG.model_path, folder)
    (weights,) = folder.glob("gptq*.safetensors")
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.down_proj.scales"][0, 0] = torch.nan
    save_file(tensors, weights, metadata={"format": "pt"})
    config = msgspec.structs.replace(CONFIG, model_path=str(folder), tp=1, split="1,1")
    with pytest.raises(NumericsError, match="layer 1 gives NaN"):
        asyncio.run(EngineClient.start(config))
    assert own_children() == []


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with the model `tiny`."""
    return add_tiny(tmp_path, "tiny")


def test_the_daemon_reports_a_killed_rank_and_loads_the_model_again(home: Path) -> None:
    with serve(home, "tiny", "--kv-memory", "32MiB", "--tp", "2") as daemon:
        engine = daemon.engine()
        (rank,) = engine.children()
        with daemon.client() as client:
            stream = client.chat.completions.create(
                model="tiny", messages=STORY, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
            )
            wait_for_text(stream)
            rank.kill()
            with pytest.raises(openai.APIError, match="rank 1 was ended by SIGKILL"):
                list(stream)
            assert_gone([engine, rank])
            answer = client.completions.create(model="tiny", prompt=[40], max_tokens=2)
            assert answer.usage.completion_tokens == 2
        again = [daemon.engine(), *daemon.engine().children()]
        assert len(again) == 2 and engine not in again
        daemon.process.kill()
        daemon.process.wait()
        assert_gone(again)


def test_a_rank_that_does_not_answer_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = (sys.executable, "-c", "import sys; sys.stdin = open(int(sys.argv[1])); sys.stdin.read()")
    monkeypatch.setattr("quantd.engine.ranks.RANK_COMMAND", silent)
    ranks = Ranks(EngineConfig(model_path="none"), World(1, ((0, 1), (1, 2))), lambda failed: None)
    try:
        with pytest.raises(RankError, match=r"has said nothing for 0\.1 s"):
            ranks.collect(RankReady, 0.1)
    finally:
        ranks.close()


def test_where_ranks_met_stays_theirs_when_they_are_gone() -> None:
    """Torch looks there again when the group's last reference goes: never at a file of somebody else."""
    ranks = Ranks(EngineConfig(model_path="none"), World(1, ((0, 1),)), lambda failed: None)
    ranks.close()
    with Path(os.devnull).open("rb"):
        assert "quantd-ranks" in str(Path(ranks.store).readlink())
