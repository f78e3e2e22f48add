"""Groups and links over gloo: sums to the bit, uneven gathers, limits in place of hangs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, cast

import psutil
import pytest
import torch
from rank_threads import RankThreads, rank_threads
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup
from waiting import PATIENCE

from quantd.engine.errors import RankError
from quantd.engine.host_copy import HostCopy
from quantd.engine.parallel import (
    ALONE,
    Link,
    Place,
    TorchGroup,
    check_copies,
    check_links,
    check_sums,
    connect,
)
from quantd.engine.split import World
from quantd.kernels.errors import QuantdError

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> Iterator[RankThreads]:
    with rank_threads(World(request.param, ((0, 1),))) as threads:
        yield threads


def of_rank(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total.to(parts[0].dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 17), (129, 1031)])
def test_sums_are_in_the_order_of_ranks(
    ranks: RankThreads, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    parts = [of_rank(rank, *shape).to(dtype) for rank in range(ranks.world.size)]
    sums = ranks.run(lambda rank, place: place.group.all_reduce(parts[rank]))
    for found in sums:
        assert found.dtype == dtype and found.shape == shape
        assert torch.equal(found, in_order(parts))


def test_a_rows_sum_does_not_depend_on_the_rows_beside_it(ranks: RankThreads) -> None:
    """Many rows are summed in parts, one row is not."""
    parts = [of_rank(rank, 300, 1000) for rank in range(ranks.world.size)]
    many = ranks.run(lambda rank, place: place.group.all_reduce(parts[rank]))[0]
    for row in (0, 137, 299):
        alone = ranks.run(lambda rank, place, row=row: place.group.all_reduce(parts[rank][row : row + 1]))[0]
        assert torch.equal(alone[0], many[row])


def test_columns_that_are_not_of_one_width_are_gathered(ranks: RankThreads) -> None:
    widths = [5, 1, 7, 3][: ranks.world.size]
    parts = [of_rank(rank, 4, width) for rank, width in enumerate(widths)]
    whole = torch.cat(parts, 1)
    for found in ranks.run(lambda rank, place: place.group.all_gather(parts[rank], widths)):
        assert torch.equal(found, whole)
    first, *others = ranks.run(lambda rank, place: place.group.gather(parts[rank], widths))
    assert torch.equal(first, whole)
    assert all(torch.equal(found, part) for found, part in zip(others, parts[1:], strict=True))


def test_alone_nothing_is_touched() -> None:
    x = of_rank(0, 2, 3)
    assert ALONE.all_reduce(x) is ALONE.all_gather(x, [3]) is ALONE.gather(x, [3]) is x


@pytest.mark.parametrize("num_stages", [2, 3])
def test_links_lead_from_stage_to_stage_and_back(num_stages: int) -> None:
    """All is sent before any of it is taken, in both places of each stage."""
    world = World(2, tuple((i, i + 1) for i in range(num_stages)))

    def pass_on(rank: int, place: Place) -> list[Tensor]:
        assert place.before is not None and place.behind is not None
        assert place.part.layers == range(rank // 2, rank // 2 + 1) and place.part.rank == rank % 2
        for number in range(3):
            place.behind.send(torch.full((number + 1, 8), 10.0 * rank + number))
        taken = [place.before.receive(number + 1) for number in range(3)]
        place.behind.flush()
        return taken

    with rank_threads(world) as threads:
        for rank, taken in enumerate(threads.run(pass_on)):
            sender = (rank - 2) % world.size
            assert [x.shape for x in taken] == [(1, 8), (2, 8), (3, 8)]
            assert [x.unique().tolist() for x in taken] == [[10 * sender + n] for n in range(3)]


class WrongSums:
    """A group with a faulty path: one element of large sums is a little off."""

    def __init__(self, place: Place) -> None:
        self._group = place.group
        self.size = place.group.size

    def all_reduce(self, x: Tensor) -> Tensor:
        total = self._group.all_reduce(x)
        if total.numel() > 1000:
            total[777] = total[777].nextafter(torch.tensor(torch.inf))
        return total


def test_wrong_sums_are_found_at_the_start(ranks: RankThreads) -> None:
    def check(rank: int, place: Place) -> str:
        with pytest.raises(
            QuantdError, match=r"131072 numbers \(torch.float32\) over . ranks came out wrong"
        ) as caught:
            check_sums(WrongSums(place), rank, CPU)  # type: ignore[arg-type]
        return str(caught.value)

    assert len(set(ranks.run(check))) == 1


@pytest.mark.parametrize(
    ("size", "dtype"), [(1 << 17, torch.float16), (1 << 17, torch.bfloat16), (1 << 21, torch.float32)]
)
def test_sums_are_tried_in_every_type_and_in_megabytes(
    ranks: RankThreads, size: int, dtype: torch.dtype
) -> None:
    class WrongOnes(WrongSums):
        def all_reduce(self, x: Tensor) -> Tensor:
            total = self._group.all_reduce(x)
            return -total if (len(total), total.dtype) == (size, dtype) else total

    def check(rank: int, place: Place) -> None:
        with pytest.raises(QuantdError, match=rf"{size} numbers \({dtype}\)"):
            check_sums(WrongOnes(place), rank, CPU)  # type: ignore[arg-type]

    ranks.run(check)


def test_a_sum_that_never_comes_ends_the_start(ranks: RankThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(HostCopy):
        def wait(self) -> Tensor:
            raise TimeoutError(f"a GPU has not come to an end for {self._time_limit} s")

    monkeypatch.setattr("quantd.engine.parallel.HostCopy", Late)

    def check(rank: int, place: Place) -> None:
        with pytest.raises(RankError, match=r"lost each other: a GPU .* 120\.0 s"):
            check_sums(place.group, rank, CPU)

    ranks.run(check)


class WrongCopies(WrongSums):
    """Columns that one way of exchange brings are in another order."""

    def __init__(self, place: Place, fault: str) -> None:
        super().__init__(place)
        self._fault = fault

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        return self._brought("gather", self._group.gather(x, widths))

    def broadcast(self, x: Tensor) -> Tensor:
        return self._brought("broadcast", self._group.broadcast(x))

    def _brought(self, way: str, x: Tensor) -> Tensor:
        return x.flip(1) if way == self._fault else x


@pytest.mark.parametrize(("fault", "victim"), [("gather", 0), ("broadcast", 1)])
def test_wrong_copies_are_found_at_the_start(ranks: RankThreads, fault: str, victim: int) -> None:
    def check(rank: int, place: Place) -> None:
        group = WrongCopies(place, fault if rank == victim else "")
        wrong = pytest.raises(QuantdError, match=f"numbers reached rank {victim} wrong")
        with wrong if rank == victim else nullcontext():
            check_copies(group, rank, CPU)  # type: ignore[arg-type]

    ranks.run(check)


class MeetingLink:
    """A link whose ends wait for each other, as when one of NCCL is first used. May break what it brings."""

    def __init__(self, breaks: bool = False) -> None:
        self._rows: SimpleQueue[Tensor] = SimpleQueue()
        self._taken: SimpleQueue[None] = SimpleQueue()
        self._breaks = breaks

    def send(self, x: Tensor) -> None:
        self._rows.put(x + 1e-3 if self._breaks else x)
        self._taken.get(timeout=PATIENCE)

    def receive(self, num_rows: int) -> Tensor:
        rows = self._rows.get(timeout=PATIENCE)
        self._taken.put(None)
        assert len(rows) == num_rows
        return rows

    def flush(self) -> None:
        """All has been taken."""


@pytest.mark.parametrize("broken", [None, 0, 2])
def test_links_are_tested_in_an_order_in_which_nobody_waits_for_one_who_waits(broken: int | None) -> None:
    links = [cast(Link, MeetingLink(breaks=stage == broken)) for stage in range(3)]
    with ThreadPoolExecutor(len(links)) as pool:
        tests = [pool.submit(check_links, links[i - 1], links[i], i == 0, 8, CPU) for i in range(len(links))]
        faults = [future.exception() for future in tests]
    assert [fault is not None for fault in faults] == [
        broken is not None and i == (broken + 1) % 3 for i in range(3)
    ]
    assert all(isinstance(fault, QuantdError | None) for fault in faults)


def test_all_that_will_be_used_is_used_before_the_ranks_have_met(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it takes is no longer free then. Only the first stage gathers and broadcasts."""
    used: Counter[tuple[str, int]] = Counter()

    def watch(kind: type[Link] | type[TorchGroup], name: str) -> None:
        real = getattr(kind, name)

        def call(self: Link | TorchGroup, *args: Any) -> Any:
            used[name, id(self)] += 1
            return real(self, *args)

        monkeypatch.setattr(kind, name, call)

    for name in ("send", "receive"):
        watch(Link, name)
    for name in ("all_reduce", "gather", "broadcast"):
        watch(TorchGroup, name)
    with rank_threads(World(2, ((0, 1), (1, 2)))) as threads:
        places = threads.places
        expected = {("send", id(place.behind)) for place in places}
        expected |= {("receive", id(place.before)) for place in places}
        expected |= {("all_reduce", id(place.group)) for place in places}
        for name in ("gather", "broadcast"):
            expected |= {(name, id(place.group)) for place in places[:2]}
        assert set(used) == expected


def test_want_of_memory_in_an_exchange_is_no_loss_of_a_rank() -> None:
    class NoRoom:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 2

        def _allgather_base(self, *args: Tensor) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        TorchGroup(cast(ProcessGroup, NoRoom()), CPU).all_reduce(torch.ones(1, 3))


@pytest.mark.parametrize("world", [World(2, ((0, 1),)), World(1, ((0, 1), (1, 2)))], ids=["group", "link"])
def test_a_rank_that_is_late_ends_the_wait(world: World) -> None:
    def wait(rank: int, place: Place) -> None:
        if rank == 1:
            return
        begun = time.monotonic()
        with pytest.raises(RankError, match=r"lost each other: .*[Tt]imed out"):
            place.group.all_reduce(torch.ones(1, 3)) if place.before is None else place.before.receive(1)
        assert 0.4 < time.monotonic() - begun < PATIENCE

    with rank_threads(world, time_limit=0.5) as threads:
        threads.run(wait)


def test_a_rank_that_never_comes_ends_the_start() -> None:
    world = World(2, ((0, 1),))
    with pytest.raises(RankError, match="lost each other"):
        connect(world, 0, HashStore(), 8, CPU, timedelta(seconds=0.5))


def test_nothing_listens_beyond_loopback(ranks: RankThreads) -> None:
    connections = psutil.Process().net_connections()
    listening = {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
    assert listening == {"127.0.0.1"}
