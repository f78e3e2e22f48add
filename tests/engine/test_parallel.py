"""Groups and links over gloo: sums to the bit, uneven gathers, limits in place of hangs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from datetime import timedelta

import psutil
import pytest
import torch
from rank_threads import RankThreads, rank_threads
from torch import Tensor
from torch.distributed import HashStore

from quantd.engine.errors import RankError
from quantd.engine.parallel import ALONE, Place, check_sums, connect
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
        with pytest.raises(QuantdError, match=r"131072 numbers over . ranks came out wrong") as caught:
            check_sums(WrongSums(place), rank, CPU)  # type: ignore[arg-type]
        return str(caught.value)

    assert len(set(ranks.run(check))) == 1


@pytest.mark.parametrize("world", [World(2, ((0, 1),)), World(1, ((0, 1), (1, 2)))], ids=["group", "link"])
def test_a_rank_that_is_late_ends_the_wait(world: World) -> None:
    def wait(rank: int, place: Place) -> None:
        if rank == 1:
            return
        begun = time.monotonic()
        with pytest.raises(RankError, match=r"lost each other: .*[Tt]imed out"):
            place.group.all_reduce(torch.ones(1, 3)) if place.before is None else place.before.receive(1)
        assert 0.4 < time.monotonic() - begun < 20

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
