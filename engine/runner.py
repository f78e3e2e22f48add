"""One forward: a Plan in, drawn tokens out; and how a runner is built from a model folder.

Keeps weights and the block pool's memory; everything about requests comes with the plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from quantd.engine.batch import build_batch, prompt_logprob_positions
from quantd.engine.config import EngineConfig
from quantd.engine.errors import CapacityError, NumericsError
from quantd.engine.logprobs import Row, token_logprob
from quantd.engine.machine import available_memory
from quantd.engine.memory import plan_blocks
from quantd.engine.messages import ModelInfo
from quantd.engine.models.architectures import decoder_spec
from quantd.engine.models.decoder import Decoder
from quantd.engine.models.spec import DecoderSpec
from quantd.engine.plan import EntryOutput, Plan, PlanEntry, RequestState, StepOutput
from quantd.engine.request import Request, SamplingParams, TokenLogprob
from quantd.engine.sampler import Sample, Sampler, check_finite
from quantd.engine.weights import DecoderWeights, Progress, load_weights
from quantd.kernels.machine import physical_cores
from quantd.kernels.select import select_ops
from quantd.quant.checkpoint import open_checkpoint
from quantd.quant.kv import FORMATS, KVPool, KVShape, block_bytes

_PROMPT_ROWS = 64  # logits of so many prompt positions are in memory at a time


class ModelRunner:
    """The Runner of a decoder (see quantd.engine.plan)."""

    def __init__(self, decoder: Decoder, pool: KVPool, sampler: Sampler, info: ModelInfo) -> None:
        self.info = info
        self._decoder = decoder
        self._forward = decoder.ops.compile(decoder.forward)
        self._kv = pool.layers()
        self._sampler = sampler

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepOutput:
        """Compute a step's tokens; draw the next one of each entry that samples."""
        batch = build_batch(plan, self.info.block_size)
        hidden = self._forward(batch.token_ids, batch.attention, self._kv)
        prompts = self._prompt_logits(hidden, batch.prompt_rows)
        # index_select copies rows; indexing wakes torch's threads, which takes longer.
        samples = iter(self._samples(plan, hidden.index_select(0, batch.sample_rows)))
        return StepOutput(
            tuple(_output(entry, prompts, next(samples) if entry.samples else None) for entry in plan.entries)
        )

    def _samples(self, plan: Plan, hidden: Tensor) -> list[Sample]:
        """hidden: [S, H], a row for each entry that samples."""
        requests = [entry.request for entry in plan.entries if entry.samples]
        return self._sampler.sample(self._decoder.logits(hidden), requests) if requests else []

    def _prompt_logits(self, hidden: Tensor, rows: Tensor) -> Iterator[Row]:
        """The logits of `rows` of hidden [M, H], computed as they are asked for, a few rows at a time."""
        for start in range(0, len(rows), _PROMPT_ROWS):
            some = hidden.index_select(0, rows[start : start + _PROMPT_ROWS])
            yield from self._decoder.logits(some).numpy()


def _output(entry: PlanEntry, prompt_logits: Iterator[Row], sample: Sample | None) -> EntryOutput:
    """An entry's part of a step. Takes its own rows, all of them, from `prompt_logits`."""
    positions = prompt_logprob_positions(entry)
    prompt = entry.request.request.prompt
    num_top = entry.request.request.sampling.prompt_logprobs or 0
    rows = islice(prompt_logits, len(positions))
    results = [_prompt_logprob(row, prompt[i], num_top) for i, row in zip(positions, rows, strict=True)]
    logprobs = [result for result in results if isinstance(result, TokenLogprob)]
    errors = [result for result in results if isinstance(result, str)]
    if sample is not None and sample.error is not None:
        errors.append(sample.error)
    if errors:
        return EntryOutput(error=errors[0])
    if sample is None:
        return EntryOutput(prompt_logprobs=logprobs)
    drawn = [] if sample.logprob is None else [sample.logprob]
    return EntryOutput(token_ids=[sample.token_id], logprobs=drawn, prompt_logprobs=logprobs)


def _prompt_logprob(row: Row, token_id: int, num_top: int) -> TokenLogprob | str:
    """The token's log probability, or why there is none."""
    try:
        check_finite(row)
    except NumericsError as error:
        return str(error)
    return token_logprob(row, token_id, num_top)


def build_runner(config: EngineConfig, progress: Progress) -> ModelRunner:
    """Load the model of `config` and make its block pool; progress: see load_weights.

    Sets this process's number of torch threads. Raises CheckpointError, UnsupportedModelError,
    CapacityError or NumericsError.
    """
    begun = time.monotonic()
    threads = config.threads or physical_cores()
    torch.set_num_threads(threads)
    checkpoint = open_checkpoint(Path(config.model_path))
    spec = decoder_spec(checkpoint.config, config.max_model_len)
    kernel_cache = None if config.kernel_cache is None else Path(config.kernel_cache)
    ops = select_ops(config.backend, config.activations, threads, kernel_cache)
    decoder = Decoder(spec, load_weights(spec, checkpoint, ops, progress), ops)
    pool = _allocate_pool(config, spec)
    _check_numerics(decoder, pool)
    return ModelRunner(decoder, pool, Sampler(), _describe(config, decoder, pool, time.monotonic() - begun))


def _allocate_pool(config: EngineConfig, spec: DecoderSpec) -> KVPool:
    format = FORMATS[config.kv_dtype]
    shape = KVShape(len(spec.layers), spec.heads.num_kv_heads, spec.heads.head_dim, config.block_size)
    size = block_bytes(format, shape)
    num_blocks = plan_blocks(config, spec.max_model_len, size, available_memory())
    try:
        return KVPool.allocate(format, shape, num_blocks)
    except OSError as error:
        raise CapacityError(
            f"no {num_blocks * size} bytes for the KV cache: {error}; lower kv_memory"
        ) from error


@torch.inference_mode()
def _check_numerics(decoder: Decoder, pool: KVPool) -> None:
    """Run one forward over the pool's first block; raise NumericsError naming what gives NaN or Inf."""
    length = min(pool.shape.block_size, decoder.spec.max_model_len)
    prompt = [i % decoder.spec.vocab_size for i in range(length)]
    state = RequestState(Request(id="", prompt=prompt, sampling=SamplingParams()))
    batch = build_batch(Plan((PlanEntry(state, 0, length, True, (0,)),)), pool.shape.block_size)
    decoder.check_finite(batch.token_ids, batch.attention, pool.layers())


def _describe(config: EngineConfig, decoder: Decoder, pool: KVPool, load_seconds: float) -> ModelInfo:
    return ModelInfo(
        architecture=decoder.spec.model_type,
        backend=decoder.ops.name,
        vocab_size=decoder.spec.vocab_size,
        max_model_len=decoder.spec.max_model_len,
        weight_bytes=_weight_bytes(decoder.weights),
        kv_dtype=config.kv_dtype,
        kv_bytes=pool.nbytes,
        kv_bytes_per_token=block_bytes(pool.format, pool.shape) // config.block_size,
        block_size=config.block_size,
        num_blocks=pool.num_blocks,
        load_seconds=load_seconds,
    )


def _weight_bytes(weights: DecoderWeights) -> int:
    """Bytes of all packed weights; a tied output matrix counts once."""
    linears = [
        linear for layer in weights.layers for linear in (layer.qkv, layer.o, layer.gate_up, layer.down)
    ]
    pieces = [weights.embedding, weights.head, *(piece for linear in linears for piece in linear)]
    return sum({id(piece): piece.nbytes for piece in pieces}.values())
