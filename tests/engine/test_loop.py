from queue import SimpleQueue

import pytest
from fakes import FATAL_TOKEN, FakeRunner, continuation, make_info, make_request

from quantd.engine.config import EngineConfig
from quantd.engine.errors import RankError
from quantd.engine.loop import EngineLoop
from quantd.engine.messages import Abort, Add, Events, FromEngine, GetStats, Stats, ToEngine
from quantd.engine.plan import Plan, StepOutput
from quantd.engine.request import TokenEvent
from quantd.engine.scheduler import Scheduler


class Harness:
    """An EngineLoop whose inbox is filled and whose frames are read by hand."""

    def __init__(self) -> None:
        self.inbox: SimpleQueue[ToEngine] = SimpleQueue()
        self.sent: list[FromEngine] = []
        self.runner = FakeRunner(make_info())
        scheduler = Scheduler(EngineConfig(model_path=""), self.runner.info)
        self.loop = EngineLoop(scheduler, self.runner, self.inbox, self.sent.append)

    def step(self, *messages: ToEngine) -> list[FromEngine]:
        for message in messages:
            self.inbox.put(message)
        self.sent.clear()
        self.loop.step()
        return list(self.sent)


def events(frames: list[FromEngine]) -> list[TokenEvent]:
    return [event for frame in frames if isinstance(frame, Events) for event in frame.events]


def test_a_request_lives_through_its_steps() -> None:
    harness, request = Harness(), make_request("a", [1, 2, 3], max_tokens=3)
    seen = events(harness.step(Add(request)))
    seen += events(harness.step()) + events(harness.step())
    assert [token for event in seen for token in event.token_ids] == continuation(request, make_info())[0]
    assert [event.finish_reason for event in seen] == [None, None, "length"]
    assert not harness.loop.scheduler.has_work


def test_an_abort_takes_effect_before_the_next_step() -> None:
    harness = Harness()
    harness.step(Add(make_request("a", [1, 2, 3])))
    (event,) = events(harness.step(Abort("a")))
    assert event.finish_reason == "abort"
    assert len(harness.runner.plans) == 1


def test_a_refusal_and_stats_need_no_step() -> None:
    harness = Harness()
    (refusal,) = events(harness.step(Add(make_request("a", []))))
    assert refusal.finish_reason == "error"
    (stats,) = harness.step(GetStats())
    assert isinstance(stats, Stats)
    assert harness.runner.plans == []


def test_a_failed_step_ends_its_requests_and_the_next_is_served() -> None:
    harness = Harness()
    (event,) = events(harness.step(Add(make_request("a", [1, FATAL_TOKEN]))))
    assert (event.finish_reason, event.error) == ("error", "the step failed: RuntimeError: the step broke")
    (event,) = events(harness.step(Add(make_request("b", [1], max_tokens=1))))
    assert event.finish_reason == "length"
    harness.step(Add(make_request("c", [1, FATAL_TOKEN])))


def test_two_failed_steps_in_a_row_end_the_loop_after_telling_the_requests() -> None:
    harness = Harness()
    harness.step(Add(make_request("a", [1, FATAL_TOKEN])))
    with pytest.raises(RuntimeError, match="the step broke"):
        harness.step(Add(make_request("b", [2, FATAL_TOKEN])))
    (event,) = events(harness.sent)
    assert (event.request_id, event.finish_reason) == ("b", "error")


def test_lost_ranks_end_the_loop_at_once() -> None:
    class LostRanks(FakeRunner):
        def run(self, plan: Plan) -> StepOutput:
            raise RankError("rank 1 was ended by SIGKILL")

    harness = Harness()
    harness.loop.runner = LostRanks(make_info())
    with pytest.raises(RankError):
        harness.step(Add(make_request("a", [1])))
    (event,) = events(harness.sent)
    assert event.error == "the step failed: rank 1 was ended by SIGKILL"
