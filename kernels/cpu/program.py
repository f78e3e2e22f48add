"""A forward recorded once as a list of C ops, and replayed with one call.

Recording runs the forward on the first token of a step alone. That writes only what the step itself
is about to write, the same bits, so nothing shows. The results that pass from op to op get places in
one arena, as wide as what is alive at the same time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from ctypes import Structure, addressof, c_void_p, pointer
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quantd.kernels.cpu import library
from quantd.kernels.cpu.library import Kind, Library, Step
from quantd.kernels.ops import AttentionInputs, KVLayer

logger = logging.getLogger(__name__)

_LANES = 16
_STEP_TENSORS = ("positions", "slots", "query_start", "context_len", "block_tables")


@dataclass(frozen=True)
class Call:
    """One op: the struct of its kind, the tensors that its pointer fields read and write in a step,
    the step it was made with, and what else must live as long as the struct."""

    kind: Kind
    args: Structure
    reads: dict[str, Tensor]
    writes: dict[str, Tensor]
    step: Step
    keep: tuple[Any, ...] = field(default=())

    def point(self) -> None:
        """Set the pointer fields to the tensors."""
        for name, tensor in (self.reads | self.writes).items():
            setattr(self.args, name, tensor.data_ptr())


class NotRecordable(Exception):
    """The forward holds arithmetic that is not this backend's ops; stays inside this package."""


def place(step: Step, inputs: AttentionInputs) -> None:
    """Point a step at where its tokens stand; the tensors must outlive its run."""
    step.num_requests, step.max_blocks = inputs.block_tables.shape
    for name in _STEP_TENSORS:
        tensor: Tensor = getattr(inputs, name)
        assert tensor.dtype == torch.int32 and tensor.is_contiguous(), (name, tensor.dtype, tensor.stride())
        setattr(step, name, tensor.data_ptr())


class Program:
    """Recorded calls, ready to run on any number of tokens."""

    def __init__(self, lib: Library, calls: Sequence[Call], step: Step, result: Tensor) -> None:
        """calls: in order. step, result: what the forward ran on and returned. Raises NotRecordable."""
        self._lib = lib
        self._calls = calls
        groups = _fuse(calls)
        places = _Places(groups, step, result)
        heads = [group.head for group in groups]
        self._ops = (library.Op * len(heads))(
            *(library.Op(call.kind, addressof(call.args)) for call in heads)
        )
        self._pointers = places.pointers
        self._result_pointers = places.result_pointers
        self._result_width = result.shape[1]
        self._width = places.width
        self._arena = torch.empty(0, self._width)

    def run(self, token_ids: Tensor, inputs: AttentionInputs) -> Tensor:
        """The forward on token_ids int32 [M] -> float32 [M, H]."""
        assert token_ids.dtype == torch.int32 and token_ids.is_contiguous(), token_ids.dtype
        num_tokens = len(token_ids)
        if num_tokens > len(self._arena):
            self._grow(num_tokens)
        out = torch.empty(num_tokens, self._result_width)
        for args, name in self._result_pointers:
            setattr(args, name, out.data_ptr())
        step = Step(num_tokens=num_tokens, token_ids=token_ids.data_ptr())
        place(step, inputs)
        self._lib.run(self._ops, step)
        return out

    def _grow(self, num_tokens: int) -> None:
        rows = 1 << (num_tokens - 1).bit_length()
        self._arena = torch.empty(rows, self._width)
        base = self._arena.data_ptr()
        for args, name, column in self._pointers:
            setattr(args, name, base + column * rows * 4)


class Replay:
    """A forward (token_ids, inputs, kv) that is recorded on its first call and when kv is another list."""

    def __init__(
        self,
        lib: Library,
        forward: Callable[..., Tensor],
        record: Callable[[Callable[[], Tensor]], tuple[Tensor, list[Call]]],
    ) -> None:
        self._lib = lib
        self._forward = forward
        self._record = record
        self._kv: Sequence[KVLayer] | None = None
        self._program: Program | None = None

    def __call__(self, token_ids: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]) -> Tensor:
        if kv is not self._kv:
            self._kv = kv
            self._program = self._recorded(token_ids, inputs, kv)
        if self._program is None:
            return self._forward(token_ids, inputs, kv)
        return self._program.run(token_ids, inputs)

    def _recorded(self, token_ids: Tensor, inputs: AttentionInputs, kv: Sequence[KVLayer]) -> Program | None:
        token, place_of_token = token_ids[:1], _first_token(inputs)
        step = Step(num_tokens=1, token_ids=token.data_ptr())
        place(step, place_of_token)
        result, calls = self._record(lambda: self._forward(token, place_of_token, kv))
        try:
            return Program(self._lib, calls, step, result)
        except NotRecordable as error:
            logger.warning("every op of a step is called from Python: %s", error)
            return None


def _first_token(inputs: AttentionInputs) -> AttentionInputs:
    positions = inputs.positions[:1]
    return AttentionInputs(
        positions=positions,
        slots=inputs.slots[:1],
        query_start=torch.tensor([0, 1], dtype=torch.int32),
        context_len=positions + 1,
        block_tables=inputs.block_tables[:1],
    )


@dataclass(frozen=True)
class _Group:
    """Calls that run as one op, that of `head`; the others hang on its struct."""

    head: Call
    others: tuple[Call, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        return (self.head, *self.others)


def _fuse(calls: Sequence[Call]) -> list[_Group]:
    """A norm goes into the linear behind it, and so does a gated activation that alone reads one."""
    groups, i = [], 0
    while i < len(calls):
        run = calls[i : i + 3]
        norm = run[0] if _feeds(run[:2], Kind.NORM, "out", Kind.LINEAR, "x") else None
        linear = run[0 if norm is None else 1]
        behind = calls[i + (norm is not None) :][:2]
        glu = behind[1] if _feeds(behind, Kind.LINEAR, "out", Kind.GLU, "gate_up") else None
        if glu is not None and (glu.args.width % _LANES or _num_readers(calls, linear.writes["out"]) > 1):
            glu = None
        if norm is not None:
            linear.args.norm = pointer(norm.args)
        if glu is not None:
            linear.args.glu = pointer(glu.args)
        others = tuple(call for call in (norm, glu) if call is not None)
        groups.append(_Group(linear, others))
        i += 1 + len(others)
    return groups


def _num_readers(calls: Sequence[Call], tensor: Tensor) -> int:
    address = tensor.data_ptr()
    return sum(address == read.data_ptr() for call in calls for read in call.reads.values())


def _feeds(pair: Sequence[Call], first: Kind, out: str, second: Kind, x: str) -> bool:
    if len(pair) < 2 or (pair[0].kind, pair[1].kind) != (first, second):
        return False
    return pair[0].writes[out].data_ptr() == pair[1].reads[x].data_ptr()


class _Places:
    """Where each result lies: its column in an arena of [width][rows] floats."""

    def __init__(self, groups: Sequence[_Group], step: Step, result: Tensor) -> None:
        self.pointers: list[tuple[Structure, str, int]] = []
        self.result_pointers: list[tuple[Structure, str]] = []
        self.width = 0
        self._result = result.data_ptr()
        self._columns: dict[int, int] = {}
        self._free: list[tuple[int, int]] = []
        last_use = _last_uses(groups)
        for i, group in enumerate(groups):
            for call in group.calls:
                _check_step(call, step)
                for tensor in call.writes.values():
                    self._allocate(tensor)
            for call in group.calls:
                self._point(call)
            self._release(groups[i], i, last_use)
        if self._result not in {out.data_ptr() for g in groups for c in g.calls for out in c.writes.values()}:
            raise NotRecordable("its result is not that of an op")

    def _point(self, call: Call) -> None:
        for name, tensor in (call.reads | call.writes).items():
            address = tensor.data_ptr()
            if address == self._result:
                self.result_pointers.append((call.args, name))
            elif address in self._columns:
                self.pointers.append((call.args, name, self._columns[address]))
            else:
                raise NotRecordable(f"{call.kind.name.lower()} reads what no op of it wrote")

    def _allocate(self, tensor: Tensor) -> None:
        address, width = tensor.data_ptr(), tensor.shape[1]
        if address == self._result or address in self._columns:
            return
        for i, (column, free) in enumerate(self._free):
            if free >= width:
                self._free[i] = (column + width, free - width)
                self._columns[address] = column
                return
        self._columns[address] = self.width
        self.width += width

    def _release(self, group: _Group, index: int, last_use: dict[int, int]) -> None:
        used = {t.data_ptr(): t for call in group.calls for t in (call.reads | call.writes).values()}
        for address, tensor in used.items():
            if last_use[address] == index and address in self._columns:
                self._free.append((self._columns[address], tensor.shape[1]))
        self._free = _merged(self._free)


def _last_uses(groups: Sequence[_Group]) -> dict[int, int]:
    """Address of a tensor -> index of the last group that reads or writes it."""
    return {
        tensor.data_ptr(): i
        for i, group in enumerate(groups)
        for call in group.calls
        for tensor in (call.reads | call.writes).values()
    }


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Free spans (column, width) in order, neighbours joined."""
    merged: list[tuple[int, int]] = []
    for column, width in sorted(span for span in spans if span[1]):
        if merged and sum(merged[-1]) == column:
            merged[-1] = (merged[-1][0], merged[-1][1] + width)
        else:
            merged.append((column, width))
    return merged


def _check_step(call: Call, step: Step) -> None:
    for name, kind in Step._fields_:
        value = getattr(call.step, name)
        if kind is c_void_p and value is not None and value != getattr(step, name):
            raise NotRecordable(f"{call.kind.name.lower()} has {name} of its own")
