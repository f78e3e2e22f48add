"""Shortlists in C, for rows that are drawn from, and rows with a mask.

The likeliest token alone numpy finds as fast, and rows that nothing cuts, or too little, have no short list.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, addressof, cast
from typing import Any

import numpy as np
import numpy.typing as npt

from quantd.kernels.cpu import library
from quantd.kernels.cpu.library import Kind, Library, Step
from quantd.kernels.shortlist import BitRow, Cut, Masks, Row, Shortlist, shortlists, tail_share

_CAPACITY = 4096


def shortlists_in_c(
    lib: Library, rows: Sequence[Row], cuts: Sequence[Cut], masks: Masks = ()
) -> list[Shortlist]:
    """As quantd.kernels.shortlist.shortlists; rows float32, contiguous, of one length."""
    masks = masks or [None] * len(rows)
    asked = [place for place, cut in enumerate(cuts) if cut.temperature > 0 or masks[place] is not None]
    found = dict(zip(asked, _collect(lib, rows, cuts, masks, asked), strict=True)) if asked else {}
    lists = (found.get(place) for place in range(len(rows)))
    return [
        one or shortlists([row], [cut], [mask])[0]
        for one, row, cut, mask in zip(lists, rows, cuts, masks, strict=True)
    ]


def _collect(
    lib: Library, rows: Sequence[Row], cuts: Sequence[Cut], masks: Masks, places: Sequence[int]
) -> list[Shortlist | None]:
    """The lists of some of the rows; None where one is too long, or there is none."""
    ids = np.empty((len(places), _CAPACITY), np.int32)
    weights = np.empty((len(places), _CAPACITY), np.float32)
    lists = (library.Shortlist * len(places))()
    for one, place, some_ids, some_weights in zip(lists, places, ids, weights, strict=True):
        _fill(one, rows[place], cuts[place], masks[place])
        one.ids, one.weights = _address(some_ids), _address(some_weights)
    args = library.ShortlistArgs(
        lists=cast(lists, POINTER(library.Shortlist)),
        num_lists=len(places),
        vocab_size=len(rows[0]),
        capacity=_CAPACITY,
    )
    lib.run([library.Op(Kind.SHORTLIST, addressof(args))], Step())
    return [_read(*one) for one in zip(lists, ids, weights, strict=True)]


def _fill(one: library.Shortlist, row: Row, cut: Cut, mask: BitRow | None) -> None:
    assert mask is None or mask.size * 32 >= row.size, (mask.size, row.size)
    one.logits, one.mask = _address(row), None if mask is None else _address(mask)
    one.temperature, one.min_weight, one.tail = cut.temperature, cut.min_p, tail_share(cut)
    one.top_k = cut.top_k


def _read(one: library.Shortlist, ids: npt.NDArray[np.int32], weights: Row) -> Shortlist | None:
    count = one.count
    if one.temperature <= 0 and one.finite:
        return Shortlist(one.largest, one.best, True)
    if count < 0:
        return None
    return Shortlist(one.largest, one.best, True, ids[:count], weights[:count], one.total)


def _address(array: npt.NDArray[Any]) -> int:
    assert array.flags.c_contiguous, array.strides
    address: int = array.__array_interface__["data"][0]
    return address
