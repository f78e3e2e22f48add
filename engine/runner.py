"""One forward: a Plan in, drawn tokens out; and how a runner is built from a model folder.

Keeps weights and the block pool's memory; everything about requests comes with the plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quantd.engine.batch import Batch, build_batch, prompt_logprob_positions
from quantd.engine.config import Allowance, EngineConfig
from quantd.engine.devices import plan_ranks, rank_memory, with_backend
from quantd.engine.errors import CapacityError, NumericsError, RankError
from quantd.engine.footprint import Footprint, foresee
from quantd.engine.host_copy import HostCopy
from quantd.engine.leading import LeadingPart, LeadingRunner, leading
from quantd.engine.logprobs import token_logprob
from quantd.engine.memory import GOOD_LEN, LEAST_LEN, workspace_bytes
from quantd.engine.memory_plan import MemoryPlan, plan_memory
from quantd.engine.messages import ModelInfo
from quantd.engine.model_part import Bench, ModelPart, load_part, prompt_chunks, select, set_up
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.models.spec import DecoderSpec
from quantd.engine.plan import EntryOutput, Plan, PlanEntry, PoolBlocks, Runner, StepOutput
from quantd.engine.pooling import HiddenRow, pool, pooled_rows
from quantd.engine.rank_messages import Allocate, RankLoaded, RankReady, StartRank
from quantd.engine.ranks import Fail, Ranks
from quantd.engine.request import TokenLogprob
from quantd.engine.sampler import Sample, Sampler, check_finite
from quantd.engine.split import World
from quantd.engine.token_masks import Masks, TokenMasks
from quantd.engine.weights import Progress
from quantd.kernels.shortlist import Row
from quantd.quant.checkpoint import Checkpoint, open_checkpoint

if TYPE_CHECKING:
    from quantd.engine.gpu_sampler import GpuSampler


class ModelRunner:
    """The Runner of a decoder (see quantd.engine.plan)."""

    def __init__(
        self,
        part: ModelPart | LeadingPart,
        sampler: Sampler | GpuSampler,
        info: ModelInfo,
        pool_blocks: PoolBlocks | None = None,
    ) -> None:
        self.info = info
        self.pool_blocks = pool_blocks
        self._part = part
        self._sampler = sampler
        self._masks = TokenMasks(info.vocab_size)

    def run(self, plan: Plan) -> StepOutput:
        """Compute a step's tokens; draw the next one of each entry that samples."""
        return self._start(plan, build_batch(plan, self.info.block_size)).result()

    @torch.inference_mode()
    def _start(self, plan: Plan, batch: Batch, drawn: Tensor | None = None) -> Step:
        """drawn: see ModelPart."""
        masks = self._masks.start([entry.request for entry in plan.entries if entry.samples])
        hidden = self._part.forward(batch, drawn)
        drawing = self._draw(plan, select(hidden, batch.sample_rows), masks, drawn)
        prompts = self._prompt_logits(hidden, batch.prompt_rows)
        pooled = self._hidden_rows(hidden, pooled_rows(plan))

        def part(entry: PlanEntry) -> EntryOutput:
            if entry.request.request.embedding is not None:
                return pool(entry, pooled)
            output, error = _prompt_output(entry, prompts), masks.result().errors.get(entry.request.id)
            return output if error is None else EntryOutput(error=error)

        # At once, for the next step may overwrite the hidden states.
        with _in_time(plan):
            return Step(plan, [part(entry) for entry in plan.entries], drawing)

    def prepare(self) -> bool:
        """See Runner."""
        return self._part.prepare()

    def _draw(self, plan: Plan, hidden: Tensor, masks: Future[Masks], drawn: Tensor | None) -> Drawing:
        """hidden: [S, H], a row for each entry that samples, as have the masks. drawn: see ModelPart."""
        requests = [entry.request for entry in plan.entries if entry.samples]
        if not requests:
            return Drawn([])
        logits = self._part.logits(hidden)
        return Drawn(self._sampler.sample(logits, requests, masks.result()))

    def _prompt_logits(self, hidden: Tensor, rows: Tensor) -> Iterator[Row]:
        """The logits of `rows` of hidden [M, H], computed as they are asked for, a few rows at a time."""
        for some in prompt_chunks(rows):
            yield from self._on_host(self._part.logits(select(hidden, some)))

    def _hidden_rows(self, hidden: Tensor, rows: list[int]) -> Iterator[HiddenRow]:
        """These rows of hidden [M, H], in the CPU's memory."""
        if rows:
            yield from self._on_host(select(hidden, torch.tensor(rows, dtype=torch.int32)).float())

    def _on_host(self, rows: Tensor) -> npt.NDArray[np.float32]:
        return HostCopy(rows, self._part.time_limit).wait().numpy()


class Step:
    """A step under way. parts: what is known of each entry but for the token that it draws."""

    def __init__(self, plan: Plan, parts: Sequence[EntryOutput], drawing: Drawing) -> None:
        self.plan = plan
        self.drawing = drawing
        self._parts = parts

    def result(self) -> StepOutput:
        """See Started."""
        with _in_time(self.plan):
            samples = iter(self.drawing.result())
        pairs = zip(self.plan.entries, self._parts, strict=True)
        return StepOutput(
            tuple(_with_sample(part, next(samples)) if entry.samples else part for entry, part in pairs)
        )


@contextmanager
def _in_time(plan: Plan) -> Iterator[None]:
    """Say which step it was that found no end."""
    try:
        yield
    except TimeoutError as error:
        raise RankError(
            f"the ranks of this model wait for each other: a step of {plan.num_tokens} tokens for "
            f"{len(plan.entries)} requests gave nothing: {error}"
        ) from error


class Drawing(Protocol):
    """Tokens that are being drawn."""

    def result(self) -> list[Sample]:
        """Wait for them."""


@dataclass(frozen=True)
class Drawn:
    """Tokens that are drawn already."""

    samples: list[Sample]

    def result(self) -> list[Sample]:
        return self.samples


def _prompt_output(entry: PlanEntry, prompt_logits: Iterator[Row]) -> EntryOutput:
    """An entry's prompt log probabilities. Takes its own rows, all of them, from `prompt_logits`."""
    positions = prompt_logprob_positions(entry)
    prompt = entry.request.request.prompt
    num_top = entry.request.request.sampling.prompt_logprobs or 0
    rows = islice(prompt_logits, len(positions))
    results = [_prompt_logprob(row, prompt[i], num_top) for i, row in zip(positions, rows, strict=True)]
    errors = [result for result in results if isinstance(result, str)]
    if errors:
        return EntryOutput(error=errors[0])
    return EntryOutput(prompt_logprobs=[result for result in results if isinstance(result, TokenLogprob)])


def _with_sample(part: EntryOutput, sample: Sample) -> EntryOutput:
    error = part.error or sample.error
    if error is not None:
        return EntryOutput(error=error)
    drawn = [] if sample.logprob is None else [sample.logprob]
    return EntryOutput([sample.token_id], drawn, part.prompt_logprobs)


def _prompt_logprob(row: Row, token_id: int, num_top: int) -> TokenLogprob | str:
    """The token's log probability, or why there is none."""
    try:
        check_finite(row)
    except NumericsError as error:
        return str(error)
    return token_logprob(row, token_id, num_top)


def refuse(error: CapacityError) -> Allowance:
    """Make no room."""
    if error.urgent:
        raise error
    return Allowance()


def build_runner(
    config: EngineConfig,
    progress: Progress,
    fail: Fail = lambda failed: None,
    make_room: Callable[[CapacityError], Allowance] = refuse,
) -> Runner:
    """Load the model of `config`, on as many ranks as it asks for, and make its block pool.

    progress: see load_weights; fail: see Ranks. make_room: called before any weight is read where memory will
    be short, for an engine of one rank; to return is to try again. Sets this process's number of torch
    threads. Raises CheckpointError, UnsupportedModelError, RequestError, CapacityError, NumericsError or
    RankError, or QuantdError where the backend cannot be had.
    """
    begun = time.monotonic()
    config = with_backend(config)
    checkpoint = open_checkpoint(Path(config.model_path))
    spec = decoder_spec(checkpoint.config, config.max_model_len)
    world = plan_ranks(config, spec, checkpoint.weight_bytes)
    if world.size > 1:
        return _build_leader(config, world, spec, checkpoint, progress, fail)
    bench = set_up(StartRank(config, world, 0, store=""), spec, checkpoint)
    config = _with_room(config, world, spec, checkpoint, bench, make_room)
    loaded = bench.load(spec, checkpoint, progress)
    memory = [loaded.memory]
    num_blocks = _plan_blocks(config, spec, memory, bench.ops.name)
    part = loaded.allocate(num_blocks)
    info = _describe(config, part, memory, num_blocks, begun)
    return _runner(config, part, info, part.blocks())


def _build_leader(
    config: EngineConfig,
    world: World,
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    progress: Progress,
    fail: Fail,
) -> LeadingRunner:
    begun = time.monotonic()
    ranks = Ranks(config, world, fail)
    try:
        loaded = load_part(StartRank(config, world, 0, ranks.store), spec, checkpoint, progress)
        memory = [loaded.memory, *ranks.collect(RankLoaded)]
        num_blocks = _plan_blocks(config, spec, memory, loaded.decoder.ops.name)
        ranks.send(Allocate(num_blocks))
        part = loaded.allocate(num_blocks)
        ranks.collect(RankReady)
    except BaseException:
        ranks.close()
        raise
    info = _describe(config, part, memory, num_blocks, begun)
    leader = LeadingPart(part, ranks)
    return leading(_runner(config, leader, info), leader)


def _with_room(
    config: EngineConfig,
    world: World,
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    bench: Bench,
    make_room: Callable[[CapacityError], Allowance],
) -> EngineConfig:
    """The config with an allowance with which the model will fit, as far as headers tell."""
    footprint = Footprint(spec, checkpoint, bench.ops)
    footprint.check()
    asked = False
    while True:
        free = {str(bench.device): rank_memory(bench.device)}
        ranks = foresee(config, world, footprint, spec, free)
        refusal = _plan(config, spec, ranks, bench.ops.name).refusal()
        if refusal is None and not asked:
            asked, refusal = True, _plan(config, spec, ranks, bench.ops.name, GOOD_LEN).refusal(urgent=False)
        if refusal is None:
            return config
        config = msgspec.structs.replace(config, allowance=make_room(refusal))


def _plan_blocks(config: EngineConfig, spec: DecoderSpec, memory: Sequence[RankLoaded], backend: str) -> int:
    plan = _plan(config, spec, memory, backend)
    if refusal := plan.refusal():
        raise refusal
    return plan.num_blocks


def _plan(
    config: EngineConfig,
    spec: DecoderSpec,
    memory: Sequence[RankLoaded],
    backend: str,
    least_len: int = LEAST_LEN,
) -> MemoryPlan:
    workspace = workspace_bytes(config, spec)
    return plan_memory(config, backend, spec.max_model_len, memory, workspace, least_len)


def _runner(
    config: EngineConfig,
    part: ModelPart | LeadingPart,
    info: ModelInfo,
    pool_blocks: PoolBlocks | None = None,
) -> ModelRunner:
    """One that draws tokens where the logits are."""
    if config.backend != "gpu":
        return ModelRunner(part, Sampler(part.decoder.ops.shortlists), info, pool_blocks)
    from quantd.engine.gpu_runner import GpuRunner  # needs triton

    return GpuRunner(part, info, pool_blocks)


def _describe(
    config: EngineConfig, part: ModelPart, ranks: Sequence[RankLoaded], num_blocks: int, begun: float
) -> ModelInfo:
    """begun: when the load did, on the monotonic clock."""
    spec = part.decoder.spec
    block_bytes = sum(rank.block_bytes for rank in ranks)
    return ModelInfo(
        architecture=spec.model_type,
        backend=part.decoder.ops.name,
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        max_model_len=spec.max_model_len,
        weight_bytes=sum(rank.weight_bytes for rank in ranks),
        kv_dtype=config.kv_dtype,
        kv_bytes=num_blocks * block_bytes,
        kv_bytes_per_token=block_bytes // config.block_size,
        block_size=config.block_size,
        num_blocks=num_blocks,
        load_seconds=time.monotonic() - begun,
        num_ranks=len(ranks),
    )
