"""Decode steps recorded as CUDA graphs, one for each of a few sizes, and replayed.

A launch takes the CPU longer than a small kernel takes the GPU, and a step has hundreds. A recorded step
costs one launch; but its shapes and addresses are fixed. So a step of requests with a token each is filled
up to the next size of a ladder: rows that nobody asked for belong to no request and have slot -1, so that
they read nothing and are written nowhere. Every other step runs eagerly.

Nothing is recorded before it is wanted: in idle time, or once a size has been met some times, so that a size
met once in a while costs nobody a wait. All ranks of a stage see the same steps and prepare at the same
times, so they record alike: what one of them records calls the others.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from quantd.engine.forward import Forward, Layers, flatten, from_tensors, host_tensors, views
from quantd.engine.parallel import ALONE, Group
from quantd.kernels.ops import AttentionInputs, KVLayer

EAGER_USES = 3
"""Steps of a size that run eagerly before it is recorded while requests wait."""

_SMALL_SIZES = (1, 2, 4, 8, 12, 16, 24, 32)
_SIZE_STEP = 16
_SMALLEST_WIDTH = 128
_WIDTH_FACTOR = 4

Replay = Callable[[], Tensor]
"""Does what was recorded once more, on what its inputs hold now. Gives the same tensor, with new contents."""

Record = Callable[[Callable[[], Tensor]], Replay]
"""Records what a function does on the device, which has been run there before. It may also run it, once.

Raises RuntimeError where that cannot be, which leaves the device as it was.
"""

_NO_INPUTS = AttentionInputs(
    positions=torch.empty(0, dtype=torch.int32),
    slots=torch.empty(0, dtype=torch.int32),
    query_start=torch.zeros(1, dtype=torch.int32),
    context_len=torch.empty(0, dtype=torch.int32),
    block_tables=torch.empty(0, 0, dtype=torch.int32),
)

logger = logging.getLogger(__name__)


class Size(NamedTuple):
    """Of a recorded step. width: blocks of its block tables."""

    num_requests: int
    width: int


def size_ladder(most: int) -> tuple[int, ...]:
    """Numbers of requests that steps are recorded for, up to `most`."""
    steps = chain(_SMALL_SIZES, range(_SMALL_SIZES[-1] + _SIZE_STEP, most, _SIZE_STEP))
    return (*(size for size in steps if size < most), most)


def width_ladder(most: int) -> tuple[int, ...]:
    """Widths of block tables that steps are recorded for, up to `most`.

    Attention starts programs for all that a table could hold, so the longest alone will not do for all.
    """
    widths = [_SMALLEST_WIDTH]
    while widths[-1] < most:
        widths.append(widths[-1] * _WIDTH_FACTOR)
    return (*widths[:-1], most)


def filled(size: Size, entering: Tensor, inputs: AttentionInputs) -> tuple[Tensor, AttentionInputs]:
    """A decode step filled up to a size: with rows that belong to no request, and requests without rows."""
    num_requests, width = inputs.block_tables.shape
    rows = (0, size.num_requests - num_requests)
    inputs = AttentionInputs(
        positions=pad(inputs.positions, rows),
        slots=pad(inputs.slots, rows, value=-1),
        query_start=pad(inputs.query_start, rows, value=num_requests),
        context_len=pad(inputs.context_len, rows),
        block_tables=pad(inputs.block_tables, (0, size.width - width, *rows)),
    )
    return pad(entering, (0, 0) * (entering.dim() - 1) + rows), inputs


class DecodeGraphs:
    """A Forward that replays decode steps and hands others on to `eager`.

    layers, kv: what `eager` calls, with what. sizes, widths: ascending. residual: float32 [sizes[-1], H] on
    the device, room for the rows that a stage before this one sends; None where token ids enter. group: the
    ranks that record together.
    """

    def __init__(
        self,
        eager: Forward,
        layers: Layers,
        kv: Sequence[KVLayer],
        device: torch.device,
        sizes: Sequence[int],
        widths: Sequence[int],
        residual: Tensor | None,
        record: Record,
        group: Group = ALONE,
    ) -> None:
        self._eager = eager
        self._layers = layers
        self._kv = kv
        self._device = device
        self._sizes = sizes
        self._widths = widths
        self._residual = residual
        self._record = record
        self._records = True
        self._group = group
        no_ids = torch.empty(0, dtype=torch.int32)
        self._nobody = no_ids if residual is None else residual[:0], _NO_INPUTS
        # All sizes read from the same memory, for one step is under way at a time.
        largest = host_tensors(*filled(Size(sizes[-1], widths[-1]), *self._nobody))
        self._inputs = flatten(largest, device).to(device)
        self._replays: dict[Size, Replay] = {}
        # A single client is what there will be.
        self._uses = Counter([Size(sizes[0], widths[0])])

    def __call__(self, entering: Tensor, inputs: AttentionInputs) -> Tensor:
        """See Forward."""
        size = self._size(inputs)
        if size is None:
            return self._eager(entering, inputs)
        self._uses[size] += 1
        if size not in self._replays and self._uses[size] > EAGER_USES:
            self._add(size)
        if size not in self._replays:
            return self._eager(entering, inputs)
        self._put(size, entering, inputs)
        return self._replays[size]()[: len(entering)]

    def prepare(self) -> bool:
        """Record the size that was met most often of those that are not recorded."""
        left = [size for size in self._uses if size not in self._replays]
        if left:
            self._add(max(left, key=self._uses.__getitem__))
        return self._records and len(left) > 1

    def close(self) -> None:
        """See Forward."""
        self._records = False
        if self._replays and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._replays.clear()

    def _size(self, inputs: AttentionInputs) -> Size | None:
        """The least that holds a step; None for what is never recorded."""
        num_requests, width = inputs.block_tables.shape
        if len(inputs.positions) != num_requests or num_requests > self._sizes[-1]:
            return None
        return Size(_rung(self._sizes, num_requests), _rung(self._widths, width))

    def _add(self, size: Size) -> None:
        """Record a size, with a step of nobody. Where that fails for one rank none records any more.

        A first run that fails beside other ranks is a step that fails: they are in the middle of theirs.
        """
        if not self._records:
            return
        replay, reason, others_wait = None, "another rank of the stage could not", self._group.size > 1
        try:
            run = partial(self._layers, *self._put(size, *self._nobody), self._kv)
            # What a first run compiles, loads and allocates cannot be recorded.
            run()
            others_wait = False
            replay = self._record(run)
        except RuntimeError as error:
            if others_wait:
                raise
            reason = str(error)
        if self._all(replay is not None) and replay is not None:
            self._replays[size] = replay
        else:
            self._records = False
            logger.warning("decode steps cannot be recorded, and run as they are from now on: %s", reason)

    def _all(self, yes: bool) -> bool:
        """Whether all ranks of the group say so."""
        if self._group.size == 1:
            return yes  # and take no memory of the device to find out
        votes = self._group.all_reduce(torch.full((1, 1), float(yes), device=self._device))
        return int(votes) == self._group.size

    def _put(self, size: Size, entering: Tensor, inputs: AttentionInputs) -> tuple[Tensor, AttentionInputs]:
        """Bring a step to where the recorded one reads it; returns that place."""
        entering, inputs = filled(size, entering, inputs)
        if self._residual is not None:
            entering = self._residual[: size.num_requests].copy_(entering)
        tensors = host_tensors(entering, inputs)
        flat = flatten(tensors, self._device)
        self._inputs[: len(flat)].copy_(flat, non_blocking=True)
        places = views(self._inputs, tensors)
        if self._residual is None and not entering.is_cpu:
            # Token ids that the step before has drawn go where those from the CPU would.
            places.append(self._inputs[len(flat) : len(flat) + len(entering)].copy_(entering))
        return from_tensors(entering, places)


def _rung(ladder: Sequence[int], least: int) -> int:
    return next(rung for rung in ladder if rung >= least)


class CudaRecorder:
    """Records CUDA graphs, which share the memory of their intermediate results."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: list[torch.cuda.CUDAGraph] = []

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        """See Record. Raises a fault of the GPU as what it is."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            # Another thread may use CUDA meanwhile, as that which watches NCCL does.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                out = run()
        except RuntimeError:
            self._recover(graph, stream)
            raise

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay

    def _recover(self, graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> None:
        """Do what torch leaves undone where it cannot end a recording."""
        torch.cuda.set_stream(stream)
        try:
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
        except RuntimeError:
            # It has been done, and there may be a graph, of a part.
            graph.reset()
        else:
            # The allocator of pinned memory will go on asking the graph whether memory is for it.
            self._failed.append(graph)
        torch.cuda.synchronize()
