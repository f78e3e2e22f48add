"""A tiny model through the whole GPU backend: on a GPU with --gpu, else on the CPU in the interpreter."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from bench.gpu_sides import interpreter
from fakes import make_info
from in_process import Completion, InProcessEngine
from safetensors.torch import save_file
from test_disk_cache import Engine
from tokenizers import Tokenizer, decoders, models
from torch import Tensor

from quantd.engine import devices, model_part
from quantd.engine.client import EngineClient
from quantd.engine.config import EngineConfig
from quantd.engine.cuda_graphs import EAGER_USES, CudaRecorder, DecodeGraphs, Record, Replay
from quantd.engine.devices import keeps_bits, plan_ranks, with_backend
from quantd.engine.forward import Eager
from quantd.engine.gpu_blocks import GpuBlocks
from quantd.engine.gpu_runner import GpuRunner
from quantd.engine.gpu_sampler import GpuSampler
from quantd.engine.grammar import Matcher
from quantd.engine.leading import LeadingAheadRunner
from quantd.engine.model_part import ModelPart, load_part, set_up
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.parallel import Place
from quantd.engine.plan import AheadRunner, Plan, RequestState, Started
from quantd.engine.rank_messages import StartRank
from quantd.engine.request import EmbeddingParams, Pooling, Request, SamplingParams, ThinkingBudget
from quantd.engine.runner import ModelRunner, build_runner
from quantd.engine.sampler import Sampler
from quantd.engine.shard import Part
from quantd.engine.split import World
from quantd.engine.token_masks import Masks
from quantd.engine.tune import tune_model
from quantd.kernels.gpu import tuning
from quantd.kernels.gpu.ops import GpuOps
from quantd.kernels.gpu.tiled import shape_of
from quantd.kernels.gpu.tuning import Gpu, Shape, Tuning, with_plan
from quantd.kernels.gpu.weights import GpuWeight
from quantd.kernels.select import choose_backend
from quantd.quant.checkpoint import open_checkpoint
from quantd.quant.kv import FORMATS, KVPool, KVShape

HIDDEN, INNER, VOCAB, LAYERS = 32, 32, 40, 2
HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 16, 2, 1
BLOCK_SIZE = 4
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {"fp16": 0.02, "bf16": 0.16}  # of log probabilities; bf16 has three bits less
NUM_TOGETHER = 3 if DEVICE.type == "cpu" else 20  # tokens that several ranks write
on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_a_gpu_each = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")

CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "quantization_config": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
    },
}
# The last two begin alike, so the second finds a block of the first.
PROMPTS = [[5, 6], [7, 8, 9, 10, 11, 12, 13], [7, 8, 9, 10, 3]]


@pytest.fixture(autouse=True, scope="module")
def arithmetic_of_a_gpu() -> Iterator[None]:
    """The interpreter computes with numpy, which warns of an Inf or NaN where a GPU goes on."""
    with np.errstate(all="ignore"), pytest.MonkeyPatch.context() as patch:
        interpreter.as_on_a_gpu(patch.setattr)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPTQ checkpoint of 4 bits."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    q, kv = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    shapes = {f"self_attn.{name}_proj": (n, HIDDEN) for name, n in (("q", q), ("k", kv), ("v", kv))}
    shapes |= {"self_attn.o_proj": (HIDDEN, q), "mlp.down_proj": (HIDDEN, INNER)}
    shapes |= {"mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN)}
    tensors = {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN).half(),
        "model.norm.weight": torch.ones(HIDDEN).half(),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN).half(),
    }
    for i in range(LAYERS):
        for module, (n, k) in shapes.items():
            tensors |= gptq(f"model.layers.{i}.{module}", n, k)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{i}.{norm}.weight"] = (1 + 0.3 * torch.randn(HIDDEN)).half()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def bf16_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint, of a model that was trained in bfloat16."""
    other = tmp_path_factory.mktemp("tiny-bf16")
    (other / "model.safetensors").symlink_to(folder / "model.safetensors")
    (other / "config.json").write_text(json.dumps(CONFIG | {"torch_dtype": "bfloat16"}))
    return other


def gptq(module: str, n: int, k: int) -> dict[str, Tensor]:
    """Random codes, eight to a word along K; all zero points 8, stored as 7."""
    codes = torch.randint(0, 16, (k // 8, 8, n))
    words = (codes << (4 * torch.arange(8))[:, None]).sum(1)
    return {
        f"{module}.qweight": (words - (words >> 31 << 32)).int(),
        f"{module}.qzeros": torch.full((k // 32, n // 8), 0x77777777, dtype=torch.int32),
        f"{module}.scales": (0.02 + 0.06 * torch.rand(k // 32, n)).half(),
        f"{module}.g_idx": (torch.arange(k) // 32).int(),
    }


def config_of(folder: Path, **options: Any) -> EngineConfig:
    values = {"kv_memory": 1 << 20, "threads": 1, "block_size": BLOCK_SIZE, "backend": "gpu", **options}
    return EngineConfig(model_path=str(folder), **values)


def build(config: EngineConfig) -> ModelRunner:
    runner = build_runner(config, lambda done, total: None)
    assert isinstance(runner, ModelRunner)
    return runner


def requests(num_tokens: int, **sampling: Any) -> list[Request]:
    params = {"temperature": 0.0, "max_tokens": num_tokens} | sampling
    return [
        Request(id=str(i), prompt=prompt, sampling=SamplingParams(**params))
        for i, prompt in enumerate(PROMPTS)
    ]


def asking(num_tokens: int = 8) -> list[Request]:
    """For log probabilities; one of the prompt's too, which rules out what is cached."""
    first = requests(num_tokens, logprobs=1, prompt_logprobs=0)[0]
    return [first, *requests(num_tokens, logprobs=1)[1:]]


def logprobs(completions: list[Completion]) -> list[float]:
    return [entry.logprob for one in completions for entry in (*one.logprobs, *one.prompt_logprobs)]


def token_ids(completions: list[Completion]) -> list[list[int]]:
    assert [completion.error for completion in completions] == [None] * len(completions)
    return [completion.token_ids for completion in completions]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[Completion]:
    """What the reference writes."""
    config = config_of(folder, backend="reference")
    return InProcessEngine(config, build(config)).serve(asking())


@pytest.mark.parametrize(("checkpoint", "dtype"), [("folder", "fp16"), ("bf16_folder", "bf16")])
def test_greedy_text_is_that_of_the_reference(
    checkpoint: str, dtype: str, expected: list[Completion], request: pytest.FixtureRequest
) -> None:
    """Prompts in chunks, a prefix that is shared, steps of prefill and decode together."""
    config = config_of(request.getfixturevalue(checkpoint), max_num_tokens=6)
    runner = build(config)
    assert runner.info.backend.startswith("gpu") and runner.info.backend.endswith(dtype)
    assert runner.info.kv_dtype == "int8"
    ours = InProcessEngine(config, runner).serve(asking())
    assert token_ids(ours) == token_ids(expected)
    assert ours[2].num_cached == BLOCK_SIZE
    for one, other in zip(ours, expected, strict=True):
        for kind in ("logprobs", "prompt_logprobs"):
            pairs = zip(getattr(one, kind), getattr(other, kind), strict=True)
            assert all(abs(a.logprob - b.logprob) < TOLERANCE[dtype] for a, b in pairs)


def test_embeddings_are_those_of_the_reference(folder: Path) -> None:
    """Beside tokens that are drawn, in chunks and whole: the same bits."""
    poolings: tuple[Pooling, ...] = ("mean", "last", "first")
    texts = [
        Request(
            id=f"text {pooling}",
            prompt=prompt * 2,
            sampling=SamplingParams(max_tokens=0),
            embedding=EmbeddingParams(pooling=pooling),
        )
        for pooling, prompt in zip(poolings, reversed(PROMPTS), strict=True)
    ]
    reference = config_of(folder, backend="reference")
    theirs = InProcessEngine(reference, build(reference)).serve(texts)
    runner = build(config_of(folder))
    chunked = InProcessEngine(config_of(folder, max_num_tokens=6), runner).serve([*requests(4), *texts])[3:]
    whole = InProcessEngine(config_of(folder), runner).serve_alone(texts)
    assert [one.embedding for one in chunked] == [one.embedding for one in whole]
    for one, other in zip(whole, theirs, strict=True):
        ours, expected = (np.frombuffer(done.embedding or b"", np.float32) for done in (one, other))
        assert ours.shape == (HIDDEN,)
        np.testing.assert_allclose(ours, expected, atol=0.02)


class Watched:
    """A runner that notes which of its steps are started ahead, and for which entries of each."""

    def __init__(self, runner: AheadRunner) -> None:
        self.info, self.pool_blocks = runner.info, runner.pool_blocks
        self.run, self.prepare = runner.run, runner.prepare
        self.ahead: list[bool] = []
        self.entries: list[list[bool]] = []
        self._runner = runner

    def start(self, plan: Plan, before: Started | None = None) -> Started:
        self.ahead.append(before is not None)
        self.entries.append([entry.ahead for entry in plan.entries])
        return self._runner.start(plan, before)


def test_steps_started_ahead_write_the_same_text(folder: Path) -> None:
    """One request after another stops or is full, with seeds, penalties and without; the others go on.

    The second prompt comes in chunks, beside a token that is drawn.
    """
    config = config_of(folder, max_num_tokens=4)
    built = build(config)
    assert isinstance(built, GpuRunner)
    runner = Watched(built)
    asked = [
        msgspec.structs.replace(request, sampling=SamplingParams(**params))
        for request, params in zip(
            requests(0),
            [
                {
                    "max_tokens": 6,
                    "temperature": 0.8,
                    "seed": 3,
                    "stop_token_ids": tuple(range(0, 40, 5)),
                    "repetition_penalty": 1.1,
                },
                {"max_tokens": 3, "temperature": 0.0, "logprobs": 2},
                {
                    "max_tokens": 5,
                    "temperature": 1.0,
                    "seed": 9,
                    "min_tokens": 3,
                    "stop_token_ids": (1, 2),
                    "presence_penalty": 1.0,
                    "thinking": ThinkingBudget(3, closing=39),
                },
            ],
            strict=True,
        )
    ]
    ahead = InProcessEngine(config, runner).serve(asked)
    assert [True, False] in runner.entries
    assert runner.ahead.count(True) >= 3
    in_turn = InProcessEngine(config, ModelRunner(built._part, GpuSampler(), built.info))
    assert ahead == in_turn.serve(asked)


def test_penalties_in_steps_started_ahead_are_those_of_the_reference(folder: Path) -> None:
    """So strong that a token counted late shows. Blocks are wanting: one request loses its own."""
    penalties: list[dict[str, Any]] = [
        {"repetition_penalty": 3.0},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"repetition_penalty": 3.0, "presence_penalty": 1.0},
    ]
    asked = [
        msgspec.structs.replace(request, sampling=SamplingParams(temperature=0.0, max_tokens=5, **params))
        for request, params in zip(requests(0), penalties, strict=True)
    ]
    reference = config_of(folder, backend="reference")
    theirs = InProcessEngine(reference, build(reference)).serve(asked)
    runner = Watched(cast(AheadRunner, build(config_of(folder))))
    engine = InProcessEngine(config_of(folder), runner, num_blocks=6)
    assert token_ids(engine.serve(asked)) == token_ids(theirs)
    assert engine.scheduler.counters.preemptions >= 1
    assert runner.ahead.count(True) >= 3
    free = InProcessEngine(reference, build(reference)).serve(requests(5))
    assert all(one != other for one, other in zip(token_ids(theirs), token_ids(free), strict=True))


def test_what_is_tuned_is_kept_and_used_by_the_next_load(folder: Path, tmp_path: Path) -> None:
    """A plan for each shape once; the measure itself needs a GPU, so here it takes what it would find."""
    seen = []

    def measure(weight: GpuWeight, dtype: torch.dtype, tuning: Tuning) -> Tuning:
        seen.append(shape_of(weight, dtype))
        shipped = tuning.plan(seen[-1])
        return with_plan(tuning, seen[-1], replace(shipped, splits=1))

    config = config_of(folder, kernel_cache=str(tmp_path))
    told = list(tune_model(config, measure))
    assert [(tuned.done, tuned.total) for tuned in told] == [(i + 1, len(seen)) for i in range(len(seen))]
    assert len(set(seen)) == len(seen) >= 3
    assert {Path(tuned.path).parent for tuned in told} == {tmp_path}
    runner = build(config)
    ops = runner._part.decoder.ops
    assert isinstance(ops, GpuOps)
    assert set(ops._tuning.measured) == set(seen)
    assert token_ids(InProcessEngine(config, runner).serve(requests(4)))


@pytest.mark.parametrize("names", [("one", "one"), ("one", "other")], ids="-".join)
@pytest.mark.parametrize("ranks", [{"tp": 2}, {"split": "1,1"}], ids=str)
def test_what_each_rank_multiplies_with_is_tuned_on_its_gpu(
    ranks: dict[str, Any],
    names: tuple[str, str],
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing twice on GPUs of one name; every rank then finds plans for all that it has."""
    monkeypatch.setattr(devices, "_num_gpus", lambda config: 0)
    monkeypatch.setattr(model_part, "rank_device", lambda config, rank: torch.device("cpu", rank))
    monkeypatch.setattr(tuning, "gpu_of", lambda device: Gpu(names[device.index], 80, 40))
    seen = []

    def measure(weight: GpuWeight, dtype: torch.dtype, tuning: Tuning) -> Tuning:
        seen.append((tuning.gpu.name, shape_of(weight, dtype)))
        return with_plan(tuning, seen[-1][1], tuning.plan(seen[-1][1]))

    config = config_of(folder, kernel_cache=str(tmp_path), **ranks)
    told = list(tune_model(config, measure))
    assert [tuned.gpu for tuned in told] == [name for name, _ in seen]
    assert len(set(seen)) == len(seen)
    assert {tuned.gpu for tuned in told if tuned.rank == 1} <= {names[1]}
    checkpoint, spec = open_checkpoint(folder), decoder_spec(CONFIG)
    world, found = plan_ranks(config, spec, checkpoint.weight_bytes), set()
    for rank, name in enumerate(names):
        bench = set_up(StartRank(config, world, rank, ""), spec, checkpoint, meets=False)
        assert isinstance(bench.ops, GpuOps)
        weights = bench.load(spec, checkpoint).decoder.weights.packed
        shapes = {shape_of(weight, torch.float16) for weight in weights if isinstance(weight, GpuWeight)}
        assert len(shapes) >= 2 and shapes <= set(bench.ops._tuning.measured)
        found |= {(name, shape) for shape in shapes}
    assert found == set(seen)


@pytest.mark.parametrize(
    ("capabilities", "asked", "build"),
    [
        ((86, 89), None, "same bits"),
        ((75, 89), None, "fast"),
        ((89, 75), None, "fast"),
        ((75, 75), True, "same bits"),
        ((89, 89), False, "fast"),
    ],
)
def test_the_promise_of_the_same_bits_is_one_for_all_ranks(
    capabilities: tuple[int, ...],
    asked: bool | None,
    build: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "_num_gpus", lambda config: len(capabilities))
    monkeypatch.setattr(devices, "gpu_of", lambda device: Gpu("some", capabilities[device.index], 40))
    config = config_of(folder, same_bits=asked)
    assert keeps_bits(config, len(capabilities)) is (build == "same bits")
    monkeypatch.setattr(model_part, "rank_device", lambda config, rank: torch.device("cpu"))
    monkeypatch.setattr(model_part, "connect", lambda *_: Place(Part(range(LAYERS))))
    checkpoint = open_checkpoint(folder)
    world = World(1, tuple((i, i + 1) for i in range(len(capabilities))))
    for rank in range(world.size):
        bench = set_up(
            StartRank(config, world, rank, str(folder / "store")), decoder_spec(CONFIG), checkpoint
        )
        assert f" {build} " in bench.ops.build


def test_a_prefix_on_disk_gives_the_bits_of_a_miss(folder: Path, tmp_path: Path) -> None:
    request = Request(
        id="0", prompt=list(range(5, 31)), sampling=SamplingParams(temperature=0.0, max_tokens=4, logprobs=1)
    )
    answers = []
    for _ in range(2):
        engine = Engine(tmp_path, build(config_of(folder)))
        engine.num_reserved = 1
        answers += engine.complete(request)
        engine.rest()
    missed, hit = answers
    assert (missed.num_cached, hit.num_cached) == (0, 24)
    assert (missed.token_ids, missed.logprobs) == (hit.token_ids, hit.logprobs)


def test_what_is_on_disk_of_other_splits_is_other_blocks() -> None:
    gpu, shape = Gpu("some", 80, 40), Shape(256, 1024, bits=4, block_k=32, input_bits=16)
    tuned = [with_plan(Tuning(gpu), shape, replace(Tuning(gpu).plan(shape), splits=n)) for n in (1, 2, 2)]
    builds = [GpuOps(DEVICE, torch.float16, tuning=tuning).build for tuning in tuned]
    assert builds[0] != builds[1] == builds[2] and "some" in builds[0]


def test_blocks_of_a_gpu_as_bytes() -> None:
    pool = torch.randint(256, (5, 192), dtype=torch.uint8).to(DEVICE)
    blocks = GpuBlocks(pool, "numerics")
    assert blocks.num_bytes == 192 and blocks.numerics == GpuBlocks(pool, "numerics").numerics
    assert blocks.read(3) == pool[3].cpu().numpy().tobytes()
    for data in (bytes(range(192)), memoryview(bytes(reversed(range(192))))):
        blocks.write(2, data)
        assert blocks.read(2) == bytes(data)
    blocks.write(0, bytes(192))
    assert GpuBlocks(pool, "numerics").numerics != blocks.numerics


class Graphs:
    """A Record in Python: it runs the function again, into the same tensor."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        out = run()

        def replay() -> Tensor:
            self.num_replays += 1
            return out.copy_(run())

        return replay


def recording_runner(folder: Path, record: Record) -> ModelRunner:
    """Its decode steps are recorded for 2 and 5 requests. Its pool holds NaN where nobody has written."""
    checkpoint = open_checkpoint(folder)
    start = StartRank(with_backend(config_of(folder)), World(1, ((0, LAYERS),)), 0, "")
    loaded = load_part(start, decoder_spec(checkpoint.config), checkpoint)
    pool = KVPool.allocate(FORMATS["int8"], KVShape(LAYERS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE), 24, DEVICE)
    pool.data.fill_(0xFF)
    kv, layers = pool.layers(), loaded.decoder.forward
    eager = Eager(layers, kv, DEVICE)
    graphs = DecodeGraphs(eager, layers, kv, DEVICE, (2, 5), (8, 16), None, record)
    part = ModelPart(loaded.decoder, loaded.place, pool, graphs)
    info = make_info(pool.num_blocks, BLOCK_SIZE, max_model_len=64)
    return GpuRunner(part, msgspec.structs.replace(info, vocab_size=VOCAB))


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")  # in rows of nobody, by the interpreter
def test_steps_that_are_recorded_write_the_same_text(folder: Path, expected: list[Completion]) -> None:
    """Three requests in the place of five; then, as they end, fewer. Rows of nobody do no harm."""
    record = Graphs() if DEVICE.type == "cpu" else CudaRecorder()
    runner = recording_runner(folder, record)
    while runner.prepare():
        pass
    served = InProcessEngine(config_of(folder), runner).serve(requests(8))
    assert token_ids(served) == token_ids(expected)
    if isinstance(record, Graphs):
        assert record.num_replays == 7 - EAGER_USES


@on_a_gpu
def test_auto_takes_a_gpu() -> None:
    assert choose_backend("auto") == choose_backend("gpu") == "gpu"


@on_a_gpu
def test_an_engine_on_a_gpu_replays_and_writes_the_same_text(folder: Path) -> None:
    """Long enough for sizes to be recorded on the way; then all again from what is recorded."""
    config = config_of(folder)
    runner = build(config)
    first = token_ids(InProcessEngine(config, runner).serve(requests(20)))
    while runner.prepare():
        pass
    alone = InProcessEngine(config, runner).serve_alone(requests(20))
    assert token_ids(InProcessEngine(config, runner).serve(requests(20))) == first == token_ids(alone)


@on_a_gpu
def test_an_engine_s_own_process_writes_the_same_text_and_ends(folder: Path) -> None:
    config = config_of(folder, backend="auto")
    request = requests(20)[0]

    async def serve() -> list[int]:
        client = await EngineClient.start(config)
        try:
            assert client.info.backend.startswith("gpu")
            return [token async for event in client.generate(request) for token in event.token_ids]
        finally:
            await client.close()

    (here,) = token_ids(InProcessEngine(config, build(config)).serve([request]))
    assert asyncio.run(asyncio.wait_for(serve(), 120)) == here


@on_a_gpu
@pytest.mark.parametrize("fault", ["not permitted", "out of memory"])
def test_a_recording_that_fails_leaves_torch_as_it_was(fault: str) -> None:
    x, stream = torch.ones(8, device=DEVICE), torch.cuda.current_stream()

    def failing() -> Tensor:
        y = x + 1
        if fault == "not permitted":
            return torch.tensor(float(y.sum()))
        return y.new_empty(1 << 50)

    recorder = CudaRecorder()
    with pytest.raises(RuntimeError):
        recorder(failing)
    assert torch.cuda.current_stream() == stream
    assert CudaRecorder()(lambda: x + 1)().tolist() == [2.0] * 8
    assert torch.empty(8, pin_memory=True).copy_(x).tolist() == [1.0] * 8


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[Completion]:
    """What one rank writes."""
    config = config_of(folder)
    return InProcessEngine(config, build(config)).serve(asking(NUM_TOGETHER))


@needs_a_gpu_each
@pytest.mark.parametrize("ranks", [{"tp": 2}, {"split": "1,1"}], ids=str)
def test_two_ranks_started_ahead_write_what_one_writes(
    folder: Path, ranks: dict[str, Any], alone: list[Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a process each, on GPUs or in interpreters that meet over gloo.

    Stages do what one rank does, bit for bit. With tp each rank rounds its part of a sum to fp16 before the
    parts meet: no more than one rank rounds everywhere, so what that may be off by is the limit here too.
    """
    if DEVICE.type == "cpu":
        monkeypatch.setattr("quantd.engine.ranks.RANK_COMMAND", (sys.executable, "-P", interpreter.__file__))
    config = config_of(folder, **ranks)
    runner = build_runner(config, lambda done, total: None)
    assert isinstance(runner, LeadingAheadRunner)
    watched = Watched(runner)
    try:
        together = InProcessEngine(config, watched).serve(asking(NUM_TOGETHER))
    finally:
        runner.close()
    assert token_ids(together) == token_ids(alone)
    tolerance = 0 if "split" in ranks else TOLERANCE["fp16"]
    assert logprobs(together) == pytest.approx(logprobs(alone), rel=0, abs=tolerance)
    assert watched.ahead.count(True) == NUM_TOGETHER - 1


def states(*params: dict[str, Any], output: tuple[int, ...] = ()) -> list[RequestState]:
    made = [
        RequestState(Request(id=str(i), prompt=[1, 2, 3], sampling=SamplingParams(**values)))
        for i, values in enumerate(params)
    ]
    for state in made:
        state.output += output
    return made


def test_what_a_request_changes_in_its_logits_is_what_the_cpu_s_sampler_changes() -> None:
    torch.manual_seed(0)
    asked: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 0},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.0, "logit_bias": {9: 20.0, 4: -100.0}, "logprobs": 1},
        {"temperature": 0.0, "repetition_penalty": 3.0},
        {"temperature": 0.0, "frequency_penalty": 2.0, "presence_penalty": 1.0},
        {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": tuple(range(VOCAB - 1))},
        {"temperature": 0.0, "min_tokens": 5, "stop_token_ids": tuple(range(VOCAB)), "logit_bias": {3: 9.0}},
        {"temperature": 0.0},
    ]
    logits = torch.randn(len(asked), VOCAB)
    logits[3, [1, 2, 3]] += 4
    logits[4, [11, 11, 12]] += 4
    logits[7, 7] = torch.nan
    requests = states(*asked, output=(11, 11, 12))
    ours = GpuSampler().sample(logits.to(DEVICE), requests)
    theirs = Sampler().sample(logits, requests)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.token_id, one.error) == (other.token_id, other.error)
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is not None and other.logprob is not None:
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-5)
            assert [token for token, _ in one.logprob.top] == [token for token, _ in other.logprob.top]
    assert [sample.error is None for sample in ours] == [True] * 6 + [False] * 2
    assert len({sample.token_id for sample in ours}) > 4


def test_a_mask_allows_what_it_allows_on_the_cpu() -> None:
    torch.manual_seed(0)
    greedy: dict[str, Any] = {"temperature": 0.0, "logprobs": 1}
    asked = [greedy, greedy | {"repetition_penalty": 9.0, "logit_bias": {30: 50.0}}, {"top_k": 9}, {}, greedy]
    logits, requests = torch.randn(len(asked), VOCAB), states(*asked, output=(11,))
    bits = np.full((len(asked), 2), -1, np.int32)
    bits[:3] = [[1 << 3 | 1 << 11, 1], [1 << 11 | 1 << 30, 0], [1 << 20 | 1 << 21, 0]]
    bits[4] = 0
    for request in (*requests[:3], requests[4]):
        request.matcher = cast(Matcher, object())
    ours = GpuSampler().sample(logits.to(DEVICE), requests, Masks(bits))
    theirs = Sampler().sample(logits, requests, Masks(bits))
    assert [sample.token_id for sample in ours[:2]] == [sample.token_id for sample in theirs[:2]]
    assert ours[0].token_id in (3, 11, 32) and ours[1].token_id == 30 and ours[2].token_id in (20, 21)
    assert ours[0].logprob is not None and theirs[0].logprob is not None
    assert ours[0].logprob.logprob == pytest.approx(theirs[0].logprob.logprob, abs=1e-5)
    assert ours[3] == GpuSampler().sample(logits[3:4].to(DEVICE), requests[3:4])[0]
    assert ours[4].error == theirs[4].error is not None


def test_a_grammar_is_followed(folder: Path, expected: list[Completion]) -> None:
    """Beside it the others write what they write anyway."""
    letters = {letter: 2 + i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz0123456789")}
    tokenizer = Tokenizer(models.BPE(vocab={"<s>": 0, "</s>": 1, **letters}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    params = SamplingParams(grammar="start: /x[a-c]{3}/", stop_token_ids=(1,), max_tokens=9)
    constrained = [
        Request(id=f"c{i}", prompt=[3, 4 + i], sampling=msgspec.structs.replace(params, seed=i))
        for i in range(3)
    ]
    served = InProcessEngine(config_of(folder), build(config_of(folder))).serve([*requests(8), *constrained])
    assert token_ids(served[:3]) == token_ids(expected)
    for answer in served[3:]:
        assert re.fullmatch("x[a-c]{3}", tokenizer.decode(answer.token_ids)), answer
        assert answer.finish_reason == "complete"


def test_a_seed_draws_the_same_alone_and_beside_others() -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, VOCAB).to(DEVICE)
    asked = states(*({"seed": seed} for seed in range(4)))
    together = GpuSampler().sample(logits, asked)
    assert GpuSampler().sample(logits[3:], asked[3:]) == together[3:]
    later = GpuSampler().sample(logits, states(*({"seed": seed} for seed in range(4)), output=(1,)))
    assert later != together
