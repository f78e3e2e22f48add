"""What drawing tokens on a GPU takes beside the logits, and what it gives: plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quantd.kernels.shortlist import GREEDY_BELOW


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


@dataclass(frozen=True)
class Adjustment:
    """What changes a row's logits before the draw, in this order.

    bias: added, by token id; -inf forbids a token. repetition: of the tokens in `seen`, negative logits
    are multiplied by it and others divided (CTRL, 2019). frequency, presence: taken off the tokens in
    `output`, once an occurrence and once (OpenAI).
    """

    bias: Mapping[int, float]
    seen: Collection[int] = ()
    output: Sequence[int] = ()
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0

    def edits(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Distinct token ids [E], and what to add, to divide by and to take off, [3, E]."""
        counted, counts = np.unique(np.array(self.output, np.int32), return_counts=True)
        biased = np.fromiter(self.bias, np.int32, len(self.bias))
        repeated = np.unique(np.fromiter(self.seen, np.int32, len(self.seen)))
        ids = np.unique(np.concatenate([biased, repeated, counted]))
        values = np.zeros((3, len(ids)), np.float32)
        values[1] = 1
        values[0, np.searchsorted(ids, biased)] = list(self.bias.values())
        values[1, np.searchsorted(ids, repeated)] = self.repetition
        values[2, np.searchsorted(ids, counted)] = self.frequency * counts + self.presence
        return ids, values


@dataclass(frozen=True)
class Edits:
    """Changes of single logits: row r's are those from start[r] to start[r + 1].

    start: int32 [R + 1]. ids: int32 [E], distinct within a row. added, divisor, taken: float32 [E].
    longest: the most of one row.
    """

    start: Tensor
    ids: Tensor
    added: Tensor
    divisor: Tensor
    taken: Tensor
    longest: int

    @classmethod
    def of(cls, rows: Sequence[Adjustment | None], device: torch.device | str) -> Edits | None:
        """Those of all rows; None where no row has any."""
        parts = [row.edits() if row is not None else _NO_EDITS for row in rows]
        lengths = [len(ids) for ids, _ in parts]
        if not any(lengths):
            return None
        start = np.cumsum([0, *lengths], dtype=np.int32)
        ids, values = (np.concatenate(part, -1) for part in zip(*parts, strict=True))
        added, divisor, taken = torch.from_numpy(values).to(device)
        return cls(_to(start, device), _to(ids, device), added, divisor, taken, max(lengths))


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


_NO_EDITS = (np.empty(0, np.int32), np.empty((3, 0), np.float32))


def _to(array: npt.NDArray[np.generic], device: torch.device | str) -> Tensor:
    return torch.from_numpy(array).to(device)
