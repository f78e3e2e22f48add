"""One rank's part of a loaded model: its layers, its blocks of the KV pool, and a step's way through them.

With several stages a step goes through as micro-batches, so that stages work at the same time: while one
computes a micro-batch, the one before it computes the next. Rows keep their order, so every row finds
what the rows before it wrote, and its bits are those it has in any other company.

A step of few rows, as most that decode, stays whole. It takes what reading takes: each of S stages reads 1/S
of the weights, W bytes in all, and of what the rows look back at, K bytes in all. In m micro-batches, which
each read the weights and 1/m of the rest, a step takes (m + S - 1) / S * (W + K / m): with S = 2 two lose to
one below K = 2 W, and never win more than a quarter. Once rows cost more than reading, cutting pays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import FileStore  # type: ignore[attr-defined]

from quantd.engine.batch import AHEAD, Batch, build_batch
from quantd.engine.config import EngineConfig
from quantd.engine.cuda_graphs import CudaRecorder, DecodeGraphs, size_ladder, width_ladder
from quantd.engine.devices import compute_dtype, keeps_bits, rank_device, rank_memory, rank_threads
from quantd.engine.errors import CapacityError
from quantd.engine.faults import describe, is_out_of_memory, kind_of
from quantd.engine.forward import Eager, Forward, moved, to_device
from quantd.engine.memory import PROMPT_ROWS, step_bytes
from quantd.engine.models.decoder import Decoder, last_finite
from quantd.engine.models.spec import DecoderSpec
from quantd.engine.parallel import TIME_LIMIT, Place, connect
from quantd.engine.plan import Plan, PlanEntry, PoolBlocks, RequestState
from quantd.engine.pool_blocks import BlockArray
from quantd.engine.rank_messages import RankLoaded, StartRank
from quantd.engine.request import Request, SamplingParams
from quantd.engine.shard import Part
from quantd.engine.split import even
from quantd.engine.weights import Progress, load_weights
from quantd.kernels.ops import AttentionInputs, Ops
from quantd.kernels.select import select_ops
from quantd.quant.checkpoint import Checkpoint
from quantd.quant.kv import FORMATS, KVFormat, KVPool, KVShape, block_bytes

_MICRO_ROWS = 64  # Fewer rows take as long as so many, or nearly.
_MICRO_BATCHES = 4  # for each stage, at most
_RESERVED_ROWS = 64  # and multiples, in which also what is recorded for more rows than a step has is counted

Through = Callable[[Tensor, AttentionInputs], Tensor]


class ModelPart:
    """What one rank computes of each step. All ranks must be called alike, with equal batches."""

    def __init__(self, decoder: Decoder, place: Place, pool: KVPool, forward: Forward) -> None:
        self.decoder = decoder
        self._place = place
        self._block_size = pool.shape.block_size
        self._device = pool.data.device
        self._pool = pool
        self._kv = pool.layers()
        self._forward = forward

    @property
    def time_limit(self) -> float | None:
        """Seconds that a step's results may be waited for, None for ever: there is no other rank."""
        return TIME_LIMIT.total_seconds() if self._place.has_others else None

    def forward(self, batch: Batch, drawn: Tensor | None = None) -> Tensor:
        """Hidden states behind the final norm, float32 [M, H]; for ranks of the first stage.

        drawn: int32 [A] on the device, the token ids that are AHEAD in the batch.
        """
        if drawn is not None:
            batch = self._with_drawn(batch, drawn)
        hidden = self._pass(batch, self._forward)
        assert hidden is not None, "a stage that is not the first has no final norm"
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Those of rows of what `forward` gave; for ranks of the first stage. See Decoder."""
        return self.decoder.logits(hidden)

    def num_shared_logits(self, batch: Batch) -> int:
        """In how many of a step's calls of `logits` other ranks take part."""
        return sum(1 for _ in logits_rows(batch)) if self._place.group.size > 1 else 0

    @torch.inference_mode()
    def follow(self, batch: Batch) -> None:
        """Do, on any rank but 0, what rank 0's `forward` and its calls of `logits` need."""
        num_ahead = int((batch.token_ids == AHEAD).sum())
        if num_ahead and self._place.part.has_ends:
            drawn = torch.empty(num_ahead, dtype=torch.int32, device=self._device)
            batch = self._with_drawn(batch, drawn)
        hidden = self._pass(batch, self._forward)
        if hidden is not None:
            for rows in logits_rows(batch):
                self.logits(select(hidden, rows))

    @torch.inference_mode()
    def prepare(self) -> bool:
        """See Forward."""
        return self._forward.prepare()

    def close(self) -> None:
        """See Forward."""
        self._forward.close()

    def shortage(self, num_bytes: int) -> str | None:
        """Why there is no memory for a step that takes so many bytes; None where there is.

        A GPU's memory stays this process's then, until some memory is not to be had.
        """
        try:
            torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return describe(error)
        return None

    def step_bytes(self, batch: Batch) -> int:
        """What a step takes beside weights and pool; steps of nearly one size take the same."""
        num_rows = -(-len(batch.token_ids) // _RESERVED_ROWS) * _RESERVED_ROWS
        num_logits = max(len(batch.sample_rows), min(len(batch.prompt_rows), PROMPT_ROWS))
        return step_bytes(self.decoder.spec, num_rows, num_logits, self._device.type == "cuda")

    def blocks(self) -> PoolBlocks | None:
        """The pool's blocks as bytes, of a model that is all here and has been checked."""
        if not self.decoder.is_whole or self._place.group.size > 1:
            return None
        ops, pool = self.decoder.ops, self._pool
        numerics = (
            f"{ops.name} {ops.build} torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} "
            f"{pool.format} {pool.shape} {self.decoder.spec}"
        )
        if self._device.type == "cpu":
            return BlockArray(pool.data.numpy(), numerics)
        from quantd.engine.gpu_blocks import GpuBlocks  # needs triton

        return GpuBlocks(pool.data, numerics)

    @torch.inference_mode()
    def check_finite(self) -> None:
        """Run one forward over the pool's first block; raise NumericsError naming what gives NaN or Inf."""
        spec = self.decoder.spec
        length = min(self._block_size, spec.max_model_len)
        prompt = [i % spec.vocab_size for i in range(length)]
        state = RequestState(Request(id="", prompt=prompt, sampling=SamplingParams()))
        batch = build_batch(Plan((PlanEntry(state, 0, length, True, (0,)),)), self._block_size)
        hidden = self._pass(batch, self._checked)
        if hidden is not None:
            self.decoder.check_logits(hidden)

    def _with_drawn(self, batch: Batch, drawn: Tensor) -> Batch:
        """The batch with rank 0's `drawn`, which the other ranks of the stage are given."""
        token_ids = self._place.group.broadcast(drawn)
        if len(drawn) < len(batch.token_ids):
            rows = (batch.token_ids == AHEAD).nonzero().view(-1)
            rows, known = moved([rows, batch.token_ids], self._device)
            token_ids = known.index_copy(0, rows, token_ids)
        return replace(batch, token_ids=token_ids)

    def _checked(self, entering: Tensor, inputs: AttentionInputs) -> Tensor:
        step = to_device(entering, inputs, self._device)
        return last_finite(self.decoder.parts(*step, self._kv))

    def _pass(self, batch: Batch, through: Through) -> Tensor | None:
        """A step's way through this rank; hidden states where the way ends here."""
        before, behind = self._place.before, self._place.behind
        if before is None or behind is None:
            return through(batch.token_ids, batch.attention)
        first, hidden = self._place.part.has_ends, None
        parts = list(micro_batches(batch.token_ids, batch.attention, self._num_micro_batches(batch)))
        for token_ids, inputs in parts:
            entering = token_ids if first else before.receive(len(token_ids))
            leaving = through(entering, inputs)
            # The next call may overwrite what is being sent.
            behind.send(leaving.clone() if len(parts) > 1 else leaving)
        if first:
            x = torch.cat([before.receive(len(token_ids)) for token_ids, _ in parts])
            hidden = self.decoder.final_norm(x)
        behind.flush()
        return hidden

    def _num_micro_batches(self, batch: Batch) -> int:
        return max(1, min(len(batch.token_ids) // _MICRO_ROWS, _MICRO_BATCHES * self._place.num_stages))


def logits_rows(batch: Batch) -> Iterator[Tensor]:
    """The rows of the hidden states that logits are computed of together, in the order of rank 0."""
    if len(batch.sample_rows):
        yield batch.sample_rows
    yield from prompt_chunks(batch.prompt_rows)


def prompt_chunks(rows: Tensor) -> Iterator[Tensor]:
    """Rows of prompt positions, a few at a time, as logits take memory."""
    for start in range(0, len(rows), PROMPT_ROWS):
        yield rows[start : start + PROMPT_ROWS]


def select(hidden: Tensor, rows: Tensor) -> Tensor:
    """These rows of hidden states [M, H], each once at most, by int32 indices in the CPU's memory."""
    if len(rows) == len(hidden):
        return hidden
    (index,) = [rows] if hidden.is_cpu else moved([rows], hidden.device)
    # index_select copies rows; indexing wakes torch's threads, which takes longer.
    return hidden.index_select(0, index)


def micro_batches(
    token_ids: Tensor, inputs: AttentionInputs, number: int
) -> Iterator[tuple[Tensor, AttentionInputs]]:
    """A step's rows, in order, as so many steps of nearly one size; a request may be cut in two."""
    for rows in even(len(token_ids), number):
        yield token_ids[rows.start : rows.stop], _rows_of(inputs, rows)


def _rows_of(inputs: AttentionInputs, rows: range) -> AttentionInputs:
    """Where these rows of a step stand; requests without any of them fall away."""
    starts = inputs.query_start
    first = int(torch.searchsorted(starts, rows.start, right=True)) - 1
    behind = int(torch.searchsorted(starts, rows.stop))
    edges = starts[first : behind + 1].clamp(rows.start, rows.stop)
    return AttentionInputs(
        positions=inputs.positions[rows.start : rows.stop],
        slots=inputs.slots[rows.start : rows.stop],
        query_start=edges - rows.start,
        context_len=inputs.positions[edges[1:] - 1] + 1,
        block_tables=inputs.block_tables[first:behind],
    )


@dataclass(frozen=True)
class LoadedPart:
    """A rank's part that has no blocks yet."""

    config: EngineConfig
    decoder: Decoder
    place: Place
    device: torch.device

    @property
    def memory(self) -> RankLoaded:
        """What the part takes, what each block will take, and what is left."""
        return RankLoaded(
            device=str(self.device),
            weight_bytes=self.decoder.weights.nbytes,
            block_bytes=block_bytes(self._format, self._shape),
            available=rank_memory(self.device),
        )

    def allocate(self, num_blocks: int) -> ModelPart:
        """Make the rank's part of the pool and check a first forward, together with all other ranks.

        Raises CapacityError or NumericsError.
        """
        try:
            pool = KVPool.allocate(self._format, self._shape, num_blocks, self.device)
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and not is_out_of_memory(error):
                raise
            size = num_blocks * block_bytes(self._format, self._shape)
            raise CapacityError(f"no {size} bytes for the KV cache: {error}; lower kv_memory") from error
        part = ModelPart(self.decoder, self.place, pool, self._forward(pool))
        part.check_finite()
        return part

    def _forward(self, pool: KVPool) -> Forward:
        """What steps go through: recorded where the backend, or else a GPU, can do that."""
        decoder, kv, device = self.decoder, pool.layers(), self.device
        if not self.place.group.recordable:
            return Eager(decoder.forward, kv, device)
        if device.type == "cpu":
            return Eager(
                decoder.ops.compile(decoder.forward) if decoder.is_whole else decoder.forward, kv, device
            )
        sizes = size_ladder(self.config.max_num_requests)
        residual = None
        if not decoder.part.has_ends:
            residual = torch.zeros(sizes[-1], decoder.spec.hidden_size, device=device)
        most_blocks = min(-(-decoder.spec.max_model_len // self.config.block_size), pool.num_blocks)
        return DecodeGraphs(
            eager=Eager(decoder.forward, kv, device),
            layers=decoder.forward,
            kv=kv,
            device=device,
            sizes=sizes,
            widths=width_ladder(most_blocks),
            residual=residual,
            record=CudaRecorder(),
            group=self.place.group,
        )

    @property
    def _format(self) -> KVFormat:
        return FORMATS[self.config.kv_dtype]

    @property
    def _shape(self) -> KVShape:
        heads, num_layers = self.decoder.heads, len(self.decoder.part.layers)
        return KVShape(num_layers, heads.num_kv_heads, heads.head_dim, self.config.block_size)


@dataclass(frozen=True)
class Bench:
    """Where a rank will compute, and with what, before anything of the model is read."""

    config: EngineConfig
    place: Place
    device: torch.device
    ops: Ops

    def load(
        self, spec: DecoderSpec, checkpoint: Checkpoint, progress: Progress = lambda done, total: None
    ) -> LoadedPart:
        """Read and pack the rank's part. Raises CheckpointError, UnsupportedModelError, CapacityError."""
        try:
            weights = load_weights(spec, checkpoint, self.ops, progress, self.place.part, self.device)
        except RuntimeError as error:
            if kind_of(error) != "OutOfMemoryError":
                raise
            raise CapacityError(
                f"{self.device} has no room for its part of the model's {checkpoint.weight_bytes} bytes of "
                "weights: free memory, spread the model with split auto or tp, or use backend cpu"
            ) from error
        decoder = Decoder(spec, weights, self.ops, self.place.part, self.place.group)
        return LoadedPart(self.config, decoder, self.place, self.device)


def set_up(start: StartRank, spec: DecoderSpec, checkpoint: Checkpoint, meets: bool = True) -> Bench:
    """Meet the other ranks if there are any, and get the kernels ready.

    meets: without it the rank stays by itself; its part can be loaded then, but not run. Sets this process's
    number of torch threads. Raises RequestError, RankError, or QuantdError where ranks
    cannot sum or the backend cannot be had.
    """
    config, world, rank = start.config, start.world, start.rank
    threads, device = rank_threads(config, world.size), rank_device(config, rank)
    torch.set_num_threads(threads)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    place = Place(Part.of(world, rank))
    if meets and world.size > 1:
        place = connect(world, rank, FileStore(start.store, world.size), spec.hidden_size, device)
    kernel_cache = None if config.kernel_cache is None else Path(config.kernel_cache)
    stage = [rank_device(config, peer) for peer in world.peers(rank)]
    dtype = compute_dtype(checkpoint.config, spec, stage)
    same_bits = keeps_bits(config, world.size)
    ops = select_ops(config.backend, config.activations, threads, kernel_cache, device, dtype, same_bits)
    return Bench(config, place, device, ops)


def load_part(
    start: StartRank, spec: DecoderSpec, checkpoint: Checkpoint, progress: Progress = lambda done, total: None
) -> LoadedPart:
    """`set_up`, then `load` of the rank's part."""
    return set_up(start, spec, checkpoint).load(spec, checkpoint, progress)
