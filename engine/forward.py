"""A rank's way through its layers, for inputs in the CPU's memory; they go to a GPU in one copy.

`Eager` calls op after op. quantd.engine.cuda_graphs is its sibling that replays what it has recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from quantd.kernels.ops import AttentionInputs, KVLayer

Layers = Callable[[Tensor, AttentionInputs, Sequence[KVLayer]], Tensor]
"""A decoder's `forward`: all its tensors lie on one device."""

_ALIGNMENT = 4  # int32, so 16 bytes, which kernels are compiled for
_FIELDS = tuple(field.name for field in fields(AttentionInputs))


class Forward(Protocol):
    """What a step's rows go through on one rank."""

    def __call__(self, entering: Tensor, inputs: AttentionInputs) -> Tensor:
        """See Decoder.forward. inputs in the CPU's memory; what enters on the device, token ids on either.

        The result is good until the next call.
        """

    def prepare(self) -> bool:
        """Do a part of what makes later calls faster, some tenths of a second; False: nothing is left."""

    def close(self) -> None:
        """Free what steps were recorded, once they are through; later ones are not recorded.

        To be done before the group that they were recorded with goes: it would wait for that (NCCL does).
        """


class Eager:
    """Layers called as they are."""

    def __init__(self, layers: Layers, kv: Sequence[KVLayer], device: torch.device) -> None:
        self._layers = layers
        self._kv = kv
        self._device = device

    def __call__(self, entering: Tensor, inputs: AttentionInputs) -> Tensor:
        """See Forward."""
        return self._layers(*to_device(entering, inputs, self._device), self._kv)

    def prepare(self) -> bool:
        """There is nothing to prepare."""
        return False

    def close(self) -> None:
        """There is nothing to free."""


def to_device(
    entering: Tensor, inputs: AttentionInputs, device: torch.device
) -> tuple[Tensor, AttentionInputs]:
    """What a step takes, on `device`; its int32 tensors are under way when this returns."""
    if device.type == "cpu":
        return entering, inputs
    return from_tensors(entering, moved(host_tensors(entering, inputs), device))


def host_tensors(entering: Tensor, inputs: AttentionInputs) -> list[Tensor]:
    """The int32 tensors of a step in the CPU's memory, last the token ids, if they enter from there."""
    tensors = [getattr(inputs, name) for name in _FIELDS]
    return [*tensors, entering] if entering.dtype == torch.int32 and entering.is_cpu else tensors


def from_tensors(entering: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, AttentionInputs]:
    """The step of `host_tensors`. entering: what it is where the last tensor is not the token ids."""
    return (*tensors[len(_FIELDS) :], entering)[0], AttentionInputs(*tensors[: len(_FIELDS)])


def moved(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of 32 or 64 bits in the CPU's memory, on `device` once one copy, under way, is through."""
    words = [tensor.view(torch.int32) for tensor in tensors]
    flat = flatten(words, device).to(device, non_blocking=True)
    return [place.view(t.dtype) for place, t in zip(views(flat, words), tensors, strict=True)]


def flatten(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """int32 tensors in one, in the CPU's memory, to be copied to `device` and read there through `views`.

    Pinned for a GPU: torch gives such memory out again only when the copy is through.
    """
    size = sum(map(_padded_len, tensors))
    flat = torch.empty(size, dtype=torch.int32, pin_memory=device.type == "cuda")
    for place, tensor in zip(views(flat, tensors), tensors, strict=True):
        place.copy_(tensor)
    return flat


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of these shapes, one after another in a flat one, each from a 16-byte boundary on."""
    starts = accumulate(map(_padded_len, like), initial=0)
    return [flat[start : start + t.numel()].view(t.shape) for start, t in zip(starts, like, strict=False)]


def _padded_len(tensor: Tensor) -> int:
    return -(-tensor.numel() // _ALIGNMENT) * _ALIGNMENT
