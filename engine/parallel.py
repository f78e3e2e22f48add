"""How ranks exchange tensors: groups that share matrices, links between stages (gloo on a CPU, NCCL on GPUs).

Knows nothing of models. Every wait has a time limit. Nothing listens beyond the loopback interface, and
there is no process-wide group: a process can hold as many as it likes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from itertools import product
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GatherOptions, PrefixStore, Store, Work

from quantd.engine.errors import RankError
from quantd.engine.faults import is_out_of_memory
from quantd.engine.host_copy import HostCopy
from quantd.engine.shard import Part
from quantd.engine.split import World
from quantd.kernels.errors import QuantdError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Backend

TIME_LIMIT = timedelta(seconds=120)

# From this size on it pays to let every rank sum a part and to exchange the sums.
_LARGE_BYTES = 256 << 10
_LATER = timedelta(seconds=30)
_TEST_SIZES = (1, 1000, 1 << 17)
_TEST_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_TEST_ROUNDS = 3
_LARGE_TEST = 1 << 21
_TEST_ROWS = (1, 256)
_NO_TRUST = "the path between these devices cannot be trusted; set NCCL_P2P_DISABLE=1"

_NCCL = {
    "NCCL_SOCKET_IFNAME": "lo",
    # What ends processes that hang is not torch's to do here, and would look once a second whether to.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class Group(Protocol):
    """The ranks of a stage, which share its matrices. Tensors are [M, N]; all ranks must call alike."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def recordable(self) -> bool:
        """Whether a backend can record a forward that calls this group (see Ops.compile)."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, in the order of ranks and in float32, as x's dtype.

        The same bits on every rank, and for an element whatever else is in x.
        """

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """All ranks' columns side by side; widths: how many each rank has."""

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """all_gather for rank 0 alone; the others get their x back."""

    def broadcast(self, x: Tensor) -> Tensor:
        """Rank 0's x, of any shape; that of the others is overwritten."""


class Alone:
    """A rank with no others, for which nothing is to do."""

    size = 1
    recordable = True

    def all_reduce(self, x: Tensor) -> Tensor:
        """x itself."""
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x itself."""
        return x

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """x itself."""
        return x

    def broadcast(self, x: Tensor) -> Tensor:
        """x itself."""
        return x


ALONE = Alone()


class TorchGroup:
    """A Group over a process group of torch. Raises RankError where ranks are lost or late."""

    def __init__(self, ranks: ProcessGroup, device: torch.device) -> None:
        self.rank = ranks.rank()
        self.size = ranks.size()
        self.recordable = device.type == "cuda"
        self._ranks = ranks

    def all_reduce(self, x: Tensor) -> Tensor:
        """See Group."""
        flat = x.reshape(-1)
        with _exchange():
            if self.size > 2 and flat.nbytes >= _LARGE_BYTES:
                return self._reduce_in_parts(flat).view(x.shape)
            return _ordered_sum(self._gather_flat(flat)).view(x.shape)

    def all_gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See Group."""
        rows = len(x)
        padded = torch.nn.functional.pad(x, (0, max(widths) - x.shape[1])).reshape(-1)
        with _exchange():
            parts = self._gather_flat(padded).view(self.size, rows, max(widths))
        return _columns(parts, widths)

    def gather(self, x: Tensor, widths: Sequence[int]) -> Tensor:
        """See Group."""
        padded = torch.nn.functional.pad(x, (0, max(widths) - x.shape[1])).contiguous()
        parts = [] if self.rank else [torch.empty_like(padded) for _ in widths]
        with _exchange():
            # Not by sends, each pair of which NCCL would give a communicator, and memory, of its own.
            self._ranks.gather([parts] if parts else [], [padded], GatherOptions()).wait()
        return _columns(parts, widths) if parts else x

    def broadcast(self, x: Tensor) -> Tensor:
        """See Group."""
        with _exchange():
            self._ranks.broadcast(x, 0).wait()
        return x

    def _gather_flat(self, flat: Tensor) -> Tensor:
        """[n] of each rank -> [size, n]."""
        parts = flat.new_empty(self.size * len(flat))
        self._ranks._allgather_base(parts, flat).wait()
        return parts.view(self.size, -1)

    def _reduce_in_parts(self, flat: Tensor) -> Tensor:
        """Each rank sums one part of [n], with the bits of a sum of it all; then parts are exchanged."""
        padded = torch.nn.functional.pad(flat, (0, -len(flat) % self.size))
        own = torch.empty_like(padded)
        self._ranks.alltoall_base(own, padded, [], []).wait()
        total = _ordered_sum(own.view(self.size, -1))
        return self._gather_flat(total).reshape(-1)[: len(flat)]


def _columns(parts: Iterable[Tensor], widths: Sequence[int]) -> Tensor:
    """The first columns of each part, side by side."""
    return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)


def _ordered_sum(parts: Tensor) -> Tensor:
    """[size, n] -> [n]."""
    total: Tensor = reduce(torch.add, parts.float())
    return total.to(parts.dtype)


class Link:
    """One direction between two ranks: float32 [M, width] from a stage to the next. Raises RankError."""

    def __init__(self, ranks: ProcessGroup, width: int, device: torch.device) -> None:
        self._ranks = ranks
        self._width = width
        self._device = device
        self._sending: list[tuple[Work, Tensor]] = []

    def send(self, x: Tensor) -> None:
        """Begin to send; `flush` must follow."""
        with _exchange():
            self._sending.append((self._ranks.send([x], 1, 0), x))

    def flush(self) -> None:
        """Wait until all is sent."""
        with _exchange():
            _wait([work for work, _ in self._sending])
        self._sending.clear()

    def receive(self, num_rows: int) -> Tensor:
        """Wait for the next tensor, of so many rows."""
        x = torch.empty(num_rows, self._width, device=self._device)
        with _exchange():
            self._ranks.recv([x], 0, 0).wait()
        return x


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its part of the decoder, those it shares it with, and the stages beside it.

    before, behind: links from the stage before and to the one behind, None where there is one stage. The
    last stage's link leads back to the first.
    """

    part: Part
    num_stages: int = 1
    group: Group = ALONE
    before: Link | None = None
    behind: Link | None = None

    @property
    def has_others(self) -> bool:
        """Whether this is one rank of several."""
        return self.group.size > 1 or self.num_stages > 1


def connect(
    world: World,
    rank: int,
    store: Store,
    width: int,
    device: torch.device,
    time_limit: timedelta = TIME_LIMIT,
) -> Place:
    """Meet the other ranks, all of which must call this, and test what they exchange.

    Whatever will be used has been used then, and has the memory that it takes (NCCL takes some for each
    pair or group that exchanges, when it first does). store: the same for all ranks. width: of what passes
    from stage to stage. Raises RankError, or QuantdError where something arrives wrong.
    """
    stage, place, num_stages = world.stage(rank), world.place(rank), len(world.stages)
    group: Group = ALONE
    links: dict[int, Link] = {}
    with _exchange():
        store.set_timeout(time_limit)
        meet = _Meeting(store, device, time_limit)
        if world.tp > 1:
            group = TorchGroup(meet.group(f"stage {stage}", place, world.tp), device)
        # Link i leads away from stage i. All make them in this order, so nobody waits for one who waits.
        for i in sorted({stage, (stage - 1) % num_stages} if num_stages > 1 else ()):
            end = 0 if i == stage else 1
            links[i] = Link(meet.group(f"link {i} {place}", end, 2), width, device)
    if isinstance(group, TorchGroup):
        check_sums(group, group.rank, device)
        if stage == 0:
            check_copies(group, group.rank, device)
    before, behind = links.get((stage - 1) % num_stages), links.get(stage)
    if before is not None and behind is not None:
        check_links(before, behind, stage == 0, width, device)
    return Place(Part.of(world, rank), num_stages, group, before, behind)


def check_sums(group: Group, rank: int, device: torch.device) -> None:
    """Sum random data, small and large and repeatedly, and compare every bit.

    Some machines' paths between GPUs return wrong data without an error. Raises QuantdError.
    """
    cases = [*product(range(_TEST_ROUNDS), _TEST_SIZES, _TEST_TYPES), (0, _LARGE_TEST, torch.float32)]
    for seed, size, dtype in cases:
        generator, num_drawn = torch.Generator().manual_seed(seed), min(size, max(_TEST_SIZES))
        drawn = torch.randn(group.size, num_drawn, generator=generator).to(device, dtype)
        parts = drawn.repeat(1, size // num_drawn)
        if not _is_same(group.all_reduce(parts[rank]), _ordered_sum(parts)):
            raise QuantdError(
                f"a sum of {size} numbers ({dtype}) over {group.size} ranks came out wrong: {_NO_TRUST}, or "
                "run without tp"
            )


def check_copies(group: Group, rank: int, device: torch.device) -> None:
    """Gather random data on rank 0, and broadcast some from there. Raises QuantdError for a wrong bit."""
    shape, generator = (_TEST_ROWS[-1], 1000), torch.Generator().manual_seed(0)
    parts = [torch.randn(shape, generator=generator).to(device) for _ in range(group.size)]
    gathered = group.gather(parts[rank], [shape[1]] * group.size)
    received = group.broadcast(parts[rank].clone())
    is_right = rank > 0 or _is_same(gathered, torch.cat(parts, 1))
    if not is_right or not _is_same(received, parts[0]):
        raise QuantdError(f"numbers reached rank {rank} wrong: {_NO_TRUST}, or run without tp")


def check_links(before: Link, behind: Link, is_first: bool, width: int, device: torch.device) -> None:
    """Pass random rows on from stage to stage, and compare every bit. Raises QuantdError.

    Stages go in the order of a step: the first use of a link is a meeting, at which each waits for the other.
    """
    wrong = []
    for num_rows in _TEST_ROWS:
        sent = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(num_rows)).to(device)
        if is_first:
            behind.send(sent)
        arrived = before.receive(num_rows)
        if not is_first:
            behind.send(sent)
        behind.flush()
        if not _is_same(arrived, sent):
            wrong.append(num_rows)
    if wrong:
        raise QuantdError(f"{wrong[0]} rows of a stage reached the next one wrong: {_NO_TRUST}")


def _is_same(found: Tensor, expected: Tensor) -> bool:
    """Whether all numbers are equal. Raises RankError where what is found is not there in time."""
    with _exchange():
        return bool(HostCopy((found == expected).all(), TIME_LIMIT.total_seconds()).wait())


class _Meeting:
    """Makes process groups whose members find each other through a store."""

    def __init__(self, store: Store, device: torch.device, time_limit: timedelta) -> None:
        self._store = store
        self._device = device
        self._time_limit = time_limit

    def group(self, name: str, rank: int, size: int) -> ProcessGroup:
        """The process group of this name, once all its members ask for it."""
        store = PrefixStore(name, self._store)
        group = ProcessGroup(store, rank, size)
        on_gpu = self._device.type == "cuda"
        kind = ProcessGroup.BackendType.NCCL if on_gpu else ProcessGroup.BackendType.GLOO
        backend = (self._nccl if on_gpu else self._gloo)(store, rank, size)
        backend._set_sequence_number_for_group()
        group._set_default_backend(kind)
        group._register_backend(self._device, kind, backend)
        return group

    def _gloo(self, store: Store, rank: int, size: int) -> Backend:
        from torch.distributed import ProcessGroupGloo  # builds of torch may lack it

        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = self._time_limit
        return ProcessGroupGloo(store, rank, size, options)

    def _nccl(self, store: Store, rank: int, size: int) -> Backend:
        from torch.distributed import ProcessGroupNCCL  # builds of torch for CPUs lack it

        for name, value in _NCCL.items():
            os.environ.setdefault(name, value)
        options = ProcessGroupNCCL.Options()
        # Torch ends the process without a reason that users see: waits of our own end before it does.
        options._timeout = self._time_limit + _LATER
        return ProcessGroupNCCL(store, rank, size, options)


def _wait(works: Sequence[Work]) -> None:
    for work in works:
        work.wait()


@contextmanager
def _exchange() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        if is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        raise RankError(f"the ranks of this model lost each other: {reason}") from error
