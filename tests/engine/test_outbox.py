"""Held events: what goes out when."""

from __future__ import annotations

from quantd.engine.messages import Events, FromEngine
from quantd.engine.outbox import Outbox
from quantd.engine.plan import Plan, PlanEntry, RequestState
from quantd.engine.request import Request, SamplingParams, TokenEvent


class Sent:
    """An outbox whose clock stands still until it is told."""

    def __init__(self) -> None:
        self.now = 100.0
        self.frames: list[FromEngine] = []
        self.outbox = Outbox(self.frames.append, 0.005, lambda: self.now)

    def add(self, *tokens: int, after: float = 0.0, finish_reason: str | None = None) -> list[list[int]]:
        """The tokens of each frame that this sends."""
        self.now += after
        before = len(self.frames)
        event = TokenEvent(request_id="a", token_ids=list(tokens), finish_reason=finish_reason)
        self.outbox.add([event] if tokens or finish_reason else [])
        return self.since(before)

    def since(self, before: int) -> list[list[int]]:
        frames = self.frames[before:]
        assert all(isinstance(frame, Events) for frame in frames)
        return [[i for event in frame.events for i in event.token_ids] for frame in frames]


def plan_of(*num_tokens: int) -> Plan:
    state = RequestState(Request(id="a", prompt=[1] * 100, sampling=SamplingParams()))
    return Plan(tuple(PlanEntry(state, 0, n, True, (0,)) for n in num_tokens))


def test_tokens_that_come_fast_go_out_together() -> None:
    sent = Sent()
    assert sent.add(1) == [[1]]
    assert sent.add(2, after=0.003) == []
    assert sent.add(3, after=0.003) == [[2, 3]]


def test_tokens_that_come_slowly_go_out_at_once() -> None:
    sent = Sent()
    assert [sent.add(i, after=0.006) for i in range(3)] == [[[0]], [[1]], [[2]]]


def test_an_end_is_not_held() -> None:
    sent = Sent()
    sent.add(1)
    assert sent.add(2) == []
    assert sent.add(3, finish_reason="length") == [[2, 3]]


def test_nothing_waits_for_a_prompt_to_be_computed() -> None:
    sent = Sent()
    sent.add(1)
    sent.add(2)
    sent.outbox.before(plan_of(1, 1))
    assert sent.since(1) == []
    sent.outbox.before(plan_of(1, 64))
    assert sent.since(1) == [[2]]


def test_no_events_make_no_frame() -> None:
    sent = Sent()
    assert sent.add(after=1.0) == []
    sent.outbox.flush()
    assert sent.frames == []
