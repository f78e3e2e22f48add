"""Which steps are replayed, and on what: with layers that give back what they read, and graphs in Python."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal
from weakref import WeakSet

import pytest
import torch
from torch import Tensor

from quantd.engine.cuda_graphs import (
    EAGER_USES,
    CudaRecorder,
    DecodeGraphs,
    Replay,
    Size,
    filled,
    size_ladder,
    width_ladder,
)
from quantd.engine.forward import Eager, flatten, moved, views
from quantd.engine.parallel import ALONE, Group
from quantd.kernels.ops import AttentionInputs, KVLayer

CPU = torch.device("cpu")
SIZES, WIDTHS = (1, 2, 4, 6), (2, 8)


def int32(values: Sequence[object]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def layers(entering: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]) -> Tensor:
    """A row of what each token can see, [M, 5 + H]; NaN where it belongs to no request.

    Like attention, it knows of requests by query_start and block_tables alone. Only rows of a request may
    have a slot.
    """
    rows = torch.full((len(entering), 6), torch.nan)
    for request, table in enumerate(inputs.block_tables):
        for row in range(int(inputs.query_start[request]), int(inputs.query_start[request + 1])):
            position = int(inputs.positions[row])
            seen = table[: position // 4 + 1].tolist()
            entered = float(entering[row].float().sum())
            weighted = sum((i + 1) * block for i, block in enumerate(seen))
            rows[row] = torch.tensor([entered, position, inputs.slots[row], len(seen), weighted, request])
    assert inputs.slots[int(inputs.query_start[-1]) :].eq(-1).all()
    return rows


class NoVotes:
    """A group that cannot be asked."""

    recordable = True

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError("a vote is cast")

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        raise NotImplementedError

    def broadcast(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    gather = all_gather


class Graphs:
    """A Record in Python: it runs the function again, into the same tensor."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.num_replays = 0

    def __call__(self, run: Callable[[], Tensor]) -> Replay:
        out = run()
        self.shapes.append(tuple(out.shape))

        def replay() -> Tensor:
            self.num_replays += 1
            return out.copy_(run())

        return replay


def eager() -> Eager:
    return Eager(layers, [], CPU)


def decode_graphs(
    record: Callable[[Callable[[], Tensor]], Replay], residual: Tensor | None = None, group: Group = ALONE
) -> DecodeGraphs:
    return DecodeGraphs(
        eager=eager(),
        layers=layers,
        kv=[],
        device=CPU,
        sizes=SIZES,
        widths=WIDTHS,
        residual=residual,
        record=record,
        group=group,
    )


def decode(num_requests: int, width: int, seed: int = 0) -> tuple[Tensor, AttentionInputs]:
    """A token of each request, somewhere in the blocks of its table."""
    torch.manual_seed(seed)
    positions = torch.randint(0, 4 * width, (num_requests,), dtype=torch.int32)
    tables = torch.randint(1, 90, (num_requests, width), dtype=torch.int32)
    slots = 4 * tables.gather(1, (positions // 4)[:, None].long())[:, 0] + positions % 4
    starts = torch.arange(num_requests + 1, dtype=torch.int32)
    ids = torch.randint(1, 1000, (num_requests,), dtype=torch.int32)
    return ids, AttentionInputs(positions, slots, starts, positions + 1, tables)


def prefill() -> tuple[Tensor, AttentionInputs]:
    """Two tokens of one request beside one of another."""
    starts, tables = int32([0, 2, 3]), int32([[5], [6]])
    return int32([7, 8, 9]), AttentionInputs(
        int32([0, 1, 3]), int32([20, 21, 27]), starts, int32([2, 4]), tables
    )


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (5, (1, 2, 4, 5)),
        (32, (1, 2, 4, 8, 12, 16, 24, 32)),
        (64, (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)),
        (70, (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 70)),
    ],
)
def test_sizes_grow_to_the_most_requests(most: int, sizes: tuple[int, ...]) -> None:
    assert size_ladder(most) == sizes


def test_widths_grow_to_the_longest_table() -> None:
    assert width_ladder(3) == (3,)
    assert width_ladder(128) == (128,)
    assert width_ladder(8192) == (128, 512, 2048, 8192)
    assert width_ladder(130) == (128, 130)


def test_a_step_is_filled_up_with_rows_of_nobody() -> None:
    ids, inputs = filled(Size(4, 3), *decode(2, 1))
    assert ids[2:].tolist() == [0, 0]
    assert inputs.query_start.tolist() == [0, 1, 2, 2, 2]
    assert inputs.slots[2:].tolist() == [-1, -1]
    assert inputs.block_tables.shape == (4, 3)
    assert inputs.block_tables[:2, 1:].eq(0).all() and inputs.block_tables[2:].eq(0).all()


def test_flat_tensors_come_out_as_they_went_in_each_on_a_boundary() -> None:
    tensors = [int32([1, 2, 3]), int32([]), int32([[4, 5, 6], [7, 8, 9]]), int32([10])]
    flat = flatten(tensors, CPU)
    for place, tensor in zip(views(flat, tensors), tensors, strict=True):
        assert torch.equal(place, tensor)
        assert place.storage_offset() % 4 == 0
    assert len(flat) == 4 + 0 + 8 + 4


def test_tensors_of_several_types_are_moved_together() -> None:
    tensors = [torch.tensor([1 << 40, -5]), torch.tensor([0.5]), int32([[1, 2], [3, 4]]), int32([])]
    for one, other in zip(moved(tensors, CPU), tensors, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_replayed_step_gives_what_an_eager_one_gives() -> None:
    """Of every size and width, large ones before small ones, so that what they leave behind would show."""
    record = Graphs()
    graphs = decode_graphs(record)
    for _ in range(EAGER_USES + 2):
        for num_requests in (6, 5, 4, 3, 2, 1):
            for width in (8, 3, 2, 1):
                step = decode(num_requests, width, seed=10 * num_requests + width)
                out = graphs(*step)
                assert torch.equal(out, layers(*step, []))
    assert sorted(set(record.shapes)) == [(size, 6) for size in SIZES]
    assert len(record.shapes) == len(SIZES) * len(WIDTHS)
    assert record.num_replays > 24


def test_what_is_recorded_reads_the_same_memory_each_time() -> None:
    places = []

    def watched(entering: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]) -> Tensor:
        places.append([entering.data_ptr(), inputs.slots.data_ptr(), inputs.block_tables.data_ptr()])
        return layers(entering, inputs, kv)

    graphs = DecodeGraphs(eager(), watched, [], CPU, SIZES, WIDTHS, None, Graphs())
    for seed in range(EAGER_USES + 3):
        graphs(*decode(2, 2, seed))
    assert len(places) == 5 and all(place == places[0] for place in places)


def test_a_size_is_recorded_once_it_has_been_met_some_times() -> None:
    record = Graphs()
    graphs = decode_graphs(record)
    for i in range(EAGER_USES + 1):
        assert record.shapes == []
        graphs(*decode(3, 1, seed=i))
    assert (record.shapes, record.num_replays) == ([(4, 6)], 1)


def test_prefills_and_more_requests_than_the_largest_size_run_eagerly() -> None:
    record = Graphs()
    graphs = decode_graphs(record)
    for step in (prefill(), decode(7, 1)):
        for _ in range(EAGER_USES + 2):
            assert torch.equal(graphs(*step), layers(*step, []))
    assert record.shapes == []


def test_idle_time_records_what_was_met_most_often_and_a_single_client_before_any() -> None:
    record = Graphs()
    graphs = decode_graphs(record)
    assert not graphs.prepare()
    assert record.shapes == [(1, 6)]
    for num_requests in (2, 4, 4):
        graphs(*decode(num_requests, 1))
    assert graphs.prepare()
    assert not graphs.prepare()
    assert record.shapes == [(1, 6), (4, 6), (2, 6)]
    assert not graphs.prepare()
    step = decode(1, 1)
    assert torch.equal(graphs(*step), layers(*step, []))
    assert record.num_replays == 1


def test_where_recording_fails_steps_run_eagerly_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def record(run: Callable[[], Tensor]) -> Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphs = decode_graphs(record, group=NoVotes(1))
    with caplog.at_level(logging.WARNING):
        for num_requests in (1, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3):
            step = decode(num_requests, 1)
            assert torch.equal(graphs(*step), layers(*step, []))
    assert not graphs.prepare()
    assert len(caplog.records) == 1 and "not permitted" in caplog.text


def test_a_first_run_that_fails_beside_other_ranks_is_a_step_that_fails() -> None:
    def broken(entering: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    graphs = DecodeGraphs(eager(), broken, [], CPU, SIZES, WIDTHS, None, Graphs(), NoVotes(2))
    with pytest.raises(torch.OutOfMemoryError):
        graphs.prepare()


def test_what_is_closed_holds_nothing_that_was_recorded_and_goes_on_eagerly() -> None:
    alive: WeakSet[Callable[[], Tensor]] = WeakSet()

    def record(run: Callable[[], Tensor]) -> Replay:
        alive.add(run)
        return run

    graphs = decode_graphs(record)
    for seed in range(EAGER_USES + 1):
        graphs(*decode(3, 1, seed))
    assert len(alive) == 1
    graphs.close()
    assert not alive
    assert not graphs.prepare()
    for seed in range(EAGER_USES + 1):
        step = decode(2, 1, seed)
        assert torch.equal(graphs(*step), layers(*step, []))
    assert not alive


class Cuda:
    """What torch does of a recording, in Python. Its end fails: early, with all to be undone yet, or late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: Literal["early", "late"]) -> None:
        self.stream = "usual"
        self.has_graph = False
        self.captures = 0
        self._fault = fault
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: self)
        monkeypatch.setattr(torch.cuda, "graph", self._graph)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "stream", stream))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self._end, raising=False)

    def synchronize(self) -> None:
        """Nothing is wrong with the GPU."""

    def reset(self) -> None:
        self.has_graph = False

    @contextmanager
    def _graph(self, graph: object, pool: tuple[int, int], capture_error_mode: str) -> Iterator[None]:
        self.stream, self.captures = "capture", 1
        try:
            yield
        finally:
            if self._fault == "early":
                raise RuntimeError("capture invalidated")
            self._end(0, pool)
            self.has_graph = True
            raise RuntimeError("no memory for the graph")

    def _end(self, device: int, pool: tuple[int, int]) -> None:
        if not self.captures:
            raise RuntimeError("not currently recording to mempool_id")
        self.captures -= 1


@pytest.mark.parametrize("fault", ["early", "late"])
def test_a_recording_that_torch_cannot_end_is_ended(
    fault: Literal["early", "late"], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(monkeypatch, fault)
    with pytest.raises(RuntimeError):
        CudaRecorder()(lambda: torch.empty(0))
    assert (cuda.stream, cuda.captures, cuda.has_graph) == ("usual", 0, False)


def test_a_fault_of_the_gpu_in_a_recording_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Cuda):
        def synchronize(self) -> None:
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    Broken(monkeypatch, "early")
    with pytest.raises(torch.AcceleratorError):
        CudaRecorder()(lambda: torch.empty(0))


def test_a_stage_behind_another_replays_on_the_rows_that_it_is_sent() -> None:
    graphs = decode_graphs(Graphs(), residual=torch.zeros(SIZES[-1], 3))
    for seed in range(EAGER_USES + 3):
        for num_requests in (6, 3):
            _, inputs = decode(num_requests, 1, seed)
            rows = torch.randint(-9, 9, (num_requests, 3)).float()
            assert torch.equal(graphs(rows, inputs), layers(rows, inputs, []))
