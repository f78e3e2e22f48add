"""What a GPU computes on its way to the CPU's memory, and the wait for it."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

_SHORTEST_NAP = 20e-6
_LONGEST_NAP = 1e-3
_NAPS_PER_WAIT = 16  # of the time waited so far, so that little of it is slept through at the end


class Event(Protocol):
    """A mark in a GPU's work, as torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the GPU has come there. Raises what went wrong before it."""

    def synchronize(self) -> None:
        """Wait until it has."""


class HostCopy:
    """A tensor on its way to the CPU's memory, which nobody waits for before they need it.

    time_limit: seconds that the wait may last, None for ever. What waits for another rank may wait for ever;
    NCCL does not look at what is replayed from a graph.
    """

    def __init__(self, tensor: Tensor, time_limit: float | None = None) -> None:
        self._tensor = tensor
        self._time_limit = time_limit
        self._event: Event | None = None
        if tensor.device.type == "cuda":
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor = pinned.copy_(tensor, non_blocking=True)
            # Waiting for one that is not blocking takes a core.
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
            self._event = event

    def wait(self) -> Tensor:
        """The copy, once it is through. Raises TimeoutError."""
        if self._event is not None:
            wait_for(self._event, self._time_limit)
        return self._tensor


def wait_for(event: Event, time_limit: float | None) -> None:
    """Wait for a GPU, which CUDA does not do for a limited time. Raises TimeoutError."""
    if time_limit is None:
        event.synchronize()
        return
    begun, waited = time.monotonic(), 0.0
    while not event.query():
        if waited > time_limit:
            raise TimeoutError(f"a GPU has not come to an end for {time_limit:g} s")
        time.sleep(min(max(waited / _NAPS_PER_WAIT, _SHORTEST_NAP), _LONGEST_NAP))
        waited = time.monotonic() - begun
