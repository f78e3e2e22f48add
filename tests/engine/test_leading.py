"""Rank 0 leads, others follow its frames and record the same steps: ranks as threads, graphs in Python."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from itertools import count
from typing import Any, TypeVar, cast

import msgspec
import pytest
import torch
from fakes import make_info
from in_process import InProcessEngine
from model_oracle import FakeCheckpoint
from rank_threads import CPU, RankThreads, rank_threads
from test_model_part import BLOCK_SIZE, NUM_LAYERS, WORLDS, checkpoint_of
from test_model_part import part_of as reference_part
from torch import Tensor

from quantd.engine.config import EngineConfig
from quantd.engine.connection import Connection
from quantd.engine.cuda_graphs import EAGER_USES, DecodeGraphs, Replay
from quantd.engine.errors import RankError
from quantd.engine.forward import Eager
from quantd.engine.gpu_runner import GpuRunner
from quantd.engine.gpu_sampler import GpuSampler
from quantd.engine.host_copy import HostCopy
from quantd.engine.leading import LeadingAheadRunner, LeadingPart, LeadingRunner, leading
from quantd.engine.memory import step_bytes
from quantd.engine.messages import ModelInfo
from quantd.engine.model_part import ModelPart
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.models.decoder import Decoder
from quantd.engine.parallel import Place
from quantd.engine.plan import Plan, Started
from quantd.engine.rank_messages import FromRank, Reserve, ToRank
from quantd.engine.ranks import Ranks
from quantd.engine.request import Request, SamplingParams
from quantd.engine.runner import ModelRunner, Step
from quantd.engine.sampler import Sampler
from quantd.engine.shard import Part
from quantd.engine.step_frame import step_of
from quantd.engine.weights import load_weights
from quantd.engine.worker import follow
from quantd.kernels.ops import AttentionInputs, HeadShape
from quantd.kernels.reference import ReferenceOps
from quantd.quant.kv import FORMATS, KVPool, KVShape

T = TypeVar("T")

CONFIG = EngineConfig(model_path="", kv_dtype="fp32", block_size=BLOCK_SIZE)
INFO = msgspec.structs.replace(make_info(16, BLOCK_SIZE, max_model_len=128), vocab_size=101)


class Graphs:
    """A Record in Python, which counts. fails: as recording may on one GPU and not on others."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.shapes: list[tuple[int, ...]] = []
        self.num_replays = 0

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        out = run()
        if self.fails:
            raise RuntimeError("no memory to record in")
        self.shapes.append(tuple(out.shape))

        def replay() -> Tensor:
            self.num_replays += 1
            return out.copy_(run())

        return replay


class FilledOps(ReferenceOps):
    """The reference, for decode steps filled up with rows of nobody, as GPUs' kernels take them."""

    def rope_kv_write(
        self, qkv: Tensor, heads: HeadShape, inputs: AttentionInputs, *args: Any, **kwargs: Any
    ) -> Tensor:
        number = int(inputs.query_start[-1])
        q = qkv.new_zeros(len(qkv), heads.num_heads * heads.head_dim)
        if number:
            q[:number] = super().rope_kv_write(qkv[:number], heads, real(inputs), *args, **kwargs)
        return q

    def attention(self, q: Tensor, heads: HeadShape, inputs: AttentionInputs, *args: Any) -> Tensor:
        number, out = int(inputs.query_start[-1]), torch.zeros_like(q)
        out[:number] = super().attention(q[:number], heads, real(inputs), *args)
        return out


def real(inputs: AttentionInputs) -> AttentionInputs:
    """Without the rows, and requests, of nobody."""
    rows = int(inputs.query_start[-1])
    number = int(torch.searchsorted(inputs.query_start, rows))
    return AttentionInputs(
        positions=inputs.positions[:rows],
        slots=inputs.slots[:rows],
        query_start=inputs.query_start[: number + 1],
        context_len=inputs.context_len[:number],
        block_tables=inputs.block_tables[:number],
    )


class Led:
    """The Ranks of threads: what they are told and say goes through sockets, as between processes."""

    def __init__(self, parts: list[ModelPart], pool: ThreadPoolExecutor) -> None:
        pairs = [socket.socketpair() for _ in parts]
        self.sent: list[ToRank] = []
        self._theirs, self._ours = ([Connection(sock) for sock in ends] for ends in zip(*pairs, strict=True))
        self._decoder = msgspec.msgpack.Decoder[FromRank](FromRank)
        self._following: list[Future[None]] = [
            pool.submit(follow, connection, part) for connection, part in zip(self._ours, parts, strict=True)
        ]

    def send(self, message: ToRank) -> None:
        self.sent.append(message)
        for connection in self._theirs:
            connection.send(message)

    def collect(self, kind: type[FromRank], time_limit: float | None) -> list[FromRank]:
        answers = [connection.receive(self._decoder) for connection in self._theirs]
        assert all(isinstance(answer, kind) for answer in answers)
        return answers

    def explain(self, error: Exception) -> RankError:
        return error if isinstance(error, RankError) else RankError(str(error))

    def close(self) -> None:
        for connection in self._theirs:
            connection.close()
        for following in self._following:
            with pytest.raises(EOFError):
                following.result(10)
        for connection in self._ours:
            connection.close()


def part_of(checkpoint: FakeCheckpoint, place: Place, graphs: Graphs) -> ModelPart:
    """Its decode steps are recorded for 1, 2 and 4 requests."""
    spec = decoder_spec(checkpoint.config)
    ops = FilledOps("fp32")
    weights = load_weights(spec, checkpoint, ops, lambda done, total: None, place.part)
    decoder = Decoder(spec, weights, ops, place.part, place.group)
    shape = KVShape(len(place.part.layers), decoder.heads.num_kv_heads, decoder.heads.head_dim, BLOCK_SIZE)
    pool = KVPool.allocate(FORMATS["fp32"], shape, 16, CPU)
    kv, residual = pool.layers(), None
    if not place.part.has_ends:
        residual = torch.zeros(4, spec.hidden_size)
    eager = Eager(decoder.forward, kv, CPU)
    forward = DecodeGraphs(eager, decoder.forward, kv, CPU, (1, 2, 4), (8,), residual, graphs, place.group)
    return ModelPart(decoder, place, pool, forward)


class World:
    """Ranks that compute together, and the recorder of each."""

    def __init__(self, threads: RankThreads, failing: tuple[int, ...], pool: ThreadPoolExecutor) -> None:
        self.graphs = [Graphs(rank in failing) for rank in range(threads.world.size)]
        checkpoint = checkpoint_of("gptq")
        parts = threads.run(lambda rank, place: part_of(checkpoint, place, self.graphs[rank]))
        self.parts = parts
        self.ranks = Led(parts[1:], pool)
        self.part = LeadingPart(parts[0], cast(Ranks, self.ranks))
        self.runner = leading(ModelRunner(self.part, Sampler(), INFO), self.part)

    def texts(self, num_requests: int, max_tokens: int) -> list[list[int]]:
        served = InProcessEngine(CONFIG, self.runner).serve(requests(num_requests, max_tokens))
        return [completion.token_ids for completion in served]

    def recorded(self) -> list[list[int]]:
        """Numbers of requests, for each rank."""
        return [[shape[0] for shape in graphs.shapes] for graphs in self.graphs]


@contextmanager
def world(name: str, failing: tuple[int, ...] = ()) -> Iterator[World]:
    size = WORLDS[name].size
    with rank_threads(WORLDS[name], width=64) as threads, ThreadPoolExecutor(size) as pool:
        made = World(threads, failing, pool)
        try:
            yield made
        finally:
            made.runner.close()


def requests(number: int, max_tokens: int) -> list[Request]:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return [Request(id=str(i), prompt=[7 + i, 9, 11 * i + 3], sampling=sampling) for i in range(number)]


@cache
def expected(num_requests: int, max_tokens: int) -> list[list[int]]:
    """What one rank writes, without graphs."""
    part = reference_part(checkpoint_of("gptq"), Place(Part(range(NUM_LAYERS))))
    runner = ModelRunner(part, Sampler(), INFO)
    served = InProcessEngine(CONFIG, runner).serve(requests(num_requests, max_tokens))
    return [completion.token_ids for completion in served]


@pytest.mark.parametrize("name", ["tp 2", "two stages", "three stages of two"])
def test_ranks_record_the_same_steps_in_idle_time_and_replay_them(name: str) -> None:
    with world(name) as made:
        assert not made.runner.prepare()
        assert made.recorded() == [[1]] * len(made.graphs)
        for number in (3, 3, 2):
            made.texts(number, max_tokens=2)
        assert made.runner.prepare()
        assert not made.runner.prepare()
        assert made.recorded() == [[1, 4, 2]] * len(made.graphs)
        assert made.texts(3, max_tokens=9) == expected(3, 9)
        assert [graphs.num_replays for graphs in made.graphs] == [8] * len(made.graphs)


def test_a_rank_that_cannot_record_keeps_the_others_of_its_stage_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING), world("tp 2", failing=(1,)) as made:
        assert made.texts(3, max_tokens=EAGER_USES + 4) == expected(3, EAGER_USES + 4)
        assert not made.runner.prepare()
        assert [graphs.num_replays for graphs in made.graphs] == [0, 0]
        assert made.texts(1, max_tokens=4) == expected(1, 4)
    assert sorted(record.getMessage().rpartition(": ")[2] for record in caplog.records) == [
        "another rank of the stage could not",
        "no memory to record in",
    ]


def test_a_stage_goes_on_recording_when_that_of_rank_0_cannot() -> None:
    with world("two stages", failing=(0,)) as made:
        for number in (3, 2):
            made.texts(number, max_tokens=2)
        assert [made.runner.prepare() for _ in range(3)] == [True, True, False]
        assert made.recorded() == [[], [1, 4, 2]]
        assert made.texts(3, max_tokens=5) == expected(3, 5)
        assert [graphs.num_replays for graphs in made.graphs] == [0, 4]


class Watched(GpuRunner):
    """Notes, of each step that it starts, which entries' tokens nobody knows yet."""

    def __init__(self, part: LeadingPart, info: ModelInfo) -> None:
        super().__init__(part, info)
        self.ahead: list[list[bool]] = []

    def start(self, plan: Plan, before: Started | None = None) -> Step:
        self.ahead.append([entry.ahead for entry in plan.entries])
        return super().start(plan, before)


@pytest.mark.parametrize("name", ["tp 2", "two stages", "three stages of two"])
def test_steps_started_ahead_on_ranks_write_the_same_text(name: str) -> None:
    """Requests end one after another, so that others change their rows, some beside chunks of a prompt."""
    params: list[dict[str, Any]] = [
        {"seed": 1, "repetition_penalty": 1.2},
        {"temperature": 0.0, "frequency_penalty": 0.5},
        {"seed": 2},
    ]
    asked = [
        msgspec.structs.replace(request, sampling=SamplingParams(max_tokens=4 + 3 * i, **params[i]))
        for i, request in enumerate(requests(3, 0))
    ]
    asked[2] = msgspec.structs.replace(asked[2], prompt=[(7 * k) % 90 + 3 for k in range(25)])
    config = msgspec.structs.replace(CONFIG, max_num_tokens=8)
    with world(name) as made:
        gpu = Watched(made.part, INFO)
        runner = leading(gpu, made.part)
        assert isinstance(runner, LeadingAheadRunner)
        ahead = InProcessEngine(config, runner).serve(asked)
        assert [True, True, False] in gpu.ahead and [True, True] in gpu.ahead
        assert made.graphs[-1].num_replays >= 1
        in_turn = InProcessEngine(config, LeadingRunner(gpu, made.part)).serve(asked)
    assert ahead == in_turn
    assert [len(completion.token_ids) for completion in ahead] == [4, 7, 10]


def long_requests() -> list[Request]:
    """The last begins as the first does."""
    sampling = SamplingParams(temperature=0.0, max_tokens=5)
    prompts = [[(7 * i + k * k) % 90 + 3 for k in range(size)] for i, size in enumerate((50, 9, 40))]
    prompts.append([*prompts[0][:40], 17])
    return [Request(id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    ("name", "rank"), [("tp 2", 0), ("tp 2", 1), ("two stages", 1), ("three stages of two", 4)]
)
def test_a_rank_that_has_no_memory_for_a_step_keeps_all_from_it_and_a_smaller_one_is_done(
    name: str, rank: int
) -> None:
    """At first for any, then for more than one request that draws a token."""
    one = ModelRunner(reference_part(checkpoint_of("gptq"), Place(Part(range(NUM_LAYERS)))), Sampler(), INFO)
    alone = [done.token_ids for done in InProcessEngine(CONFIG, one).serve(long_requests())]
    with world(name) as made:
        asked: list[int] = []
        room = step_bytes(made.parts[0].decoder.spec, 64, 1, on_gpu=False)

        def shortage(num_bytes: int) -> str | None:
            asked.append(num_bytes)
            return "none left" if len(asked) < 4 or num_bytes > room else None

        made.parts[rank].shortage = shortage  # type: ignore[method-assign]
        engine = InProcessEngine(CONFIG, made.runner)
        assert [done.token_ids for done in engine.serve(long_requests())] == alone
        assert engine.scheduler.counters.preemptions > 1
        assert all(isinstance(message, Reserve) for message in made.ranks.sent[:4])
        # A refusal is followed by another question, a step that has found its memory by steps of its size.
        kinds = "".join(type(message).__name__[0] for message in made.ranks.sent)
        assert re.fullmatch("R{4}S+(R+S+)*", kinds), kinds
        assert [message.num_bytes for message in made.ranks.sent if isinstance(message, Reserve)] == asked
        made.parts[rank].shortage = lambda num_bytes: None  # type: ignore[method-assign]
        engine.scheduler.limits.num_tokens = 512
        for _ in range(3):
            assert [done.token_ids for done in engine.serve(long_requests())] == alone
            made.ranks.sent, sent = [], made.ranks.sent
        assert not any(isinstance(message, Reserve) for message in sent)


def short(function: Callable[..., T], *calls: int) -> Callable[..., T]:
    """The function, but that at the end of some of its calls, by their numbers, memory is wanting."""
    number = count()

    def run(*args: Any) -> T:
        result = function(*args)
        if next(number) in calls:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        return result

    return run


@pytest.mark.parametrize("is_ahead", [False, True])
@pytest.mark.parametrize("name", ["tp 2", "two stages", "three stages of two"])
@pytest.mark.parametrize("place", ["before others are told", "drawing"])
def test_where_nobody_waits_a_step_without_memory_on_rank_0_is_done_again(
    place: str, name: str, is_ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = ModelRunner(reference_part(checkpoint_of("gptq"), Place(Part(range(NUM_LAYERS)))), Sampler(), INFO)
    alone = [done.token_ids for done in InProcessEngine(CONFIG, one).serve(long_requests())]
    if place == "drawing":
        drawing = GpuSampler if is_ahead else Sampler
        function = "start" if is_ahead else "sample"
        monkeypatch.setattr(drawing, function, short(getattr(drawing, function), 0, 1, 4))
    else:
        monkeypatch.setattr("quantd.engine.leading.step_of", short(step_of, 0, 1, 4))
    with world(name) as made:
        runner = leading(GpuRunner(made.part, INFO), made.part) if is_ahead else made.runner
        engine = InProcessEngine(CONFIG, runner)
        assert [done.token_ids for done in engine.serve(long_requests())] == alone
        # Whoever found too little memory once is asked whether there is enough.
        assert sum(isinstance(message, Reserve) for message in made.ranks.sent) > 3


def test_stages_without_tp_do_a_step_again_that_found_no_memory_for_its_logits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Decoder, "logits", short(Decoder.logits, 0, 2))
    with world("two stages") as made:
        assert made.texts(3, 5) == expected(3, 5)


def test_memory_that_is_wanting_while_others_may_wait_is_the_end_of_the_ranks() -> None:
    with world("two stages") as made:
        made.parts[0].forward = short(made.parts[0].forward, 0)  # type: ignore[method-assign]
        with pytest.raises(RankError, match="out of memory"):
            made.texts(1, 2)


class StuckCopy(HostCopy):
    """Of what a GPU never comes to compute."""

    class Never:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            raise AssertionError("this would last for ever")

    def __init__(self, tensor: Tensor, time_limit: float | None = None) -> None:
        super().__init__(tensor, time_limit)
        self._event = self.Never()


def test_a_step_for_which_ranks_wait_too_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quantd.engine.model_part.TIME_LIMIT", timedelta(seconds=0.1))
    for module in ("gpu_sampler", "runner"):
        monkeypatch.setattr(f"quantd.engine.{module}.HostCopy", StuckCopy)
    prompt_logprobs = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    with world("tp 2") as made:
        for params in (SamplingParams(temperature=0.0, max_tokens=4), prompt_logprobs):
            asked = [msgspec.structs.replace(request, sampling=params) for request in requests(2, 0)]
            runner = leading(GpuRunner(made.part, INFO), made.part)
            with pytest.raises(RankError, match=r"a step of 6 tokens for 2 requests gave nothing: .* 0\.1 s"):
                InProcessEngine(CONFIG, runner).serve(asked)
