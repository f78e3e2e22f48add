"""The wait for a GPU, of which there is none here: events that say what they are told to."""

from __future__ import annotations

import time

import pytest
import torch

from quantd.engine.host_copy import HostCopy, wait_for


class FakeEvent:
    """The GPU comes there after so many questions, or when it is waited for."""

    def __init__(self, num_queries: float) -> None:
        self.left = num_queries
        self.num_waits = 0

    def query(self) -> bool:
        self.left -= 1
        return self.left < 0

    def synchronize(self) -> None:
        self.num_waits += 1


def test_one_gpu_is_waited_for_without_asking() -> None:
    event = FakeEvent(torch.inf)
    wait_for(event, None)
    assert (event.num_waits, event.left) == (1, torch.inf)


def test_what_comes_in_time_ends_the_wait() -> None:
    event = FakeEvent(50)
    wait_for(event, 20)
    assert (event.num_waits, event.left) == (0, -1)


def test_what_does_not_come_ends_it_too_without_taking_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    now, naps = [5.0], list[float]()

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(TimeoutError, match="for 120 s"):
        wait_for(FakeEvent(torch.inf), 120)
    assert 120 < sum(naps) < 120.1
    assert max(naps) <= 1e-3 and naps == sorted(naps)
    # At the end of a decode step of 10 ms no more than a sixteenth is slept through.
    done = [sum(naps[:i]) for i in range(2, 500)]
    assert all(nap <= waited / 10 for nap, waited in zip(naps[2:500], done, strict=True) if waited > 1e-3)


def test_a_copy_on_the_cpu_is_there() -> None:
    x = torch.arange(3)
    assert HostCopy(x, 0.0).wait() is x
