"""What drawing tokens on a GPU takes beside the logits, and what it gives: plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quantd.kernels.shortlist import GREEDY_BELOW

Ints: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
_NO_INTS, _ONCE = np.empty(0, np.int32), np.ones(1, np.int32)


class Status(IntEnum):
    """What became of a row. NOT_FINITE: a logit is NaN or infinite. NOTHING_ALLOWED: all are forbidden."""

    DRAWN = 0
    NOT_FINITE = 1
    NOTHING_ALLOWED = 2


class Samples(NamedTuple):
    """A token of each row. token_ids: int32 [R], 0 where there is none. status: int32 [R].

    logprobs: float32 [R], natural logarithms, of the logits as they came in.
    """

    token_ids: Tensor
    logprobs: Tensor
    status: Tensor


class Draw(NamedTuple):
    """How a row's token is drawn. temperature below GREEDY_BELOW: the likeliest; top_k below 1: off.

    seed, position: of the row's random stream, int64 and 0 .. 2**31 - 1; the draw is a function of them
    and the row alone.
    """

    temperature: float
    seed: int
    position: int
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


class Adjustment(NamedTuple):
    """What changes a row's logits before the draw, in this order.

    bias: added, by token id; -inf forbids a token. seen: the tokens of prompt and output, distinct and
    ascending; counts: how often each is in the output. repetition: of seen tokens, negative logits are
    multiplied by it and others divided (CTRL, 2019). frequency, presence: taken off the tokens in the output,
    once an occurrence and once (OpenAI). place: where in `drawn` (see sample) one more token of the output
    is, which only the device knows; -1: there is none.
    """

    bias: Mapping[int, float]
    seen: Ints = _NO_INTS
    counts: Ints = _NO_INTS
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    place: int = -1

    def edits(self) -> tuple[Ints, Floats]:
        """Token ids [E], distinct and ascending, and what to add, to divide by, to take off, and to take off
        where the token that only the device knows is this one, [4, E].
        """
        listed = self.counts > 0 if self.repetition == 1 else slice(None)
        seen, counts = self.seen[listed], self.counts[listed]
        biased = np.fromiter(self.bias, np.int32, len(self.bias))
        ids = np.union1d(biased, seen) if self.bias else seen
        values = np.zeros((4, len(ids)), np.float32)
        values[0, ids.searchsorted(biased)] = list(self.bias.values())
        values[1], values[3] = 1, self.taken(_ONCE)
        at = ids.searchsorted(seen)
        values[1, at] = self.repetition
        values[2, at] = np.where(counts > 0, self.taken(counts), 0)
        values[3, at] = self.taken(counts + 1)
        return ids, values

    def taken(self, counts: Ints) -> Floats:
        """What is taken off tokens that are so many times, at least once, in the output."""
        return (self.frequency * counts + self.presence).astype(np.float32)


@dataclass(frozen=True)
class Edits:
    """Changes of single logits: row r's are those from start[r] to start[r + 1].

    start: int32 [R + 1]. ids: int32 [E], distinct and ascending within a row. added, divisor, taken: float32
    [E]. place: int32 [R], see Adjustment. For the token there: repetition: float32 [R], its divisor;
    taken_again: float32 [E], where it is one of ids, and taken_once: float32 [R], where it is not. longest:
    the most edits of one row.
    """

    start: Tensor
    ids: Tensor
    added: Tensor
    divisor: Tensor
    taken: Tensor
    taken_again: Tensor
    place: Tensor
    repetition: Tensor
    taken_once: Tensor
    longest: int

    @classmethod
    def of(cls, rows: Sequence[Adjustment | None], device: torch.device | str) -> Edits | None:
        """Those of all rows; None where no row has an adjustment."""
        if not any(row is not None for row in rows):
            return None
        adjustments = [row if row is not None else _NO_ADJUSTMENT for row in rows]
        parts = [row.edits() for row in adjustments]
        lengths = [len(ids) for ids, _ in parts]
        ids, values = (np.concatenate(part, -1) for part in zip(*parts, strict=True))
        added, divisor, taken, taken_again = torch.from_numpy(values).to(device)
        once = np.array([(row.repetition, *row.taken(_ONCE)) for row in adjustments], np.float32)
        repetition, taken_once = torch.from_numpy(once.T.copy()).to(device)
        return cls(
            start=_to(np.cumsum([0, *lengths], dtype=np.int32), device),
            ids=_to(ids, device),
            added=added,
            divisor=divisor,
            taken=taken,
            taken_again=taken_again,
            place=_to(np.array([row.place for row in adjustments], np.int32), device),
            repetition=repetition,
            taken_once=taken_once,
            longest=max(lengths),
        )


@dataclass(frozen=True)
class SamplingInputs:
    """How the rows of a step are drawn; each tensor [R].

    temperature, top_p, min_p: float32. top_k, position: int32. seed: int64. mask: int32
    [R, at least ceil(V / 32)], bit i % 32 of word i // 32 set where token i is allowed. draws,
    cuts_top_k, cuts_top_p: whether any row needs that; what a row gets does not depend on them.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    position: Tensor
    draws: bool
    cuts_top_k: bool
    cuts_top_p: bool
    edits: Edits | None = None
    mask: Tensor | None = None

    @classmethod
    def of(
        cls,
        rows: Sequence[Draw],
        device: torch.device | str,
        adjustments: Sequence[Adjustment | None] = (),
        mask: Tensor | None = None,
    ) -> SamplingInputs:
        """adjustments: one a row, or none at all; mask: on that device."""
        random = [row for row in rows if row.temperature >= GREEDY_BELOW]
        floats = np.array([(row.temperature, row.top_p, row.min_p) for row in rows], np.float32)
        temperature, top_p, min_p = torch.from_numpy(floats.reshape(-1, 3).T.copy()).to(device)
        ints = np.array([(min(max(row.top_k, 0), 2**31 - 1), row.position) for row in rows], np.int32)
        top_k, position = torch.from_numpy(ints.reshape(-1, 2).T.copy()).to(device)
        return cls(
            temperature,
            top_k,
            top_p,
            min_p,
            _to(np.array([row.seed for row in rows], np.int64), device),
            position,
            draws=bool(random),
            cuts_top_k=any(row.top_k > 0 for row in random),
            cuts_top_p=any(row.top_p < 1 for row in random),
            edits=Edits.of(adjustments, device),
            mask=mask,
        )


_NO_ADJUSTMENT = Adjustment({})


def _to(array: npt.NDArray[np.generic], device: torch.device | str) -> Tensor:
    return torch.from_numpy(array).to(device)
