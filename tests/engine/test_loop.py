from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from fakes import FATAL_TOKEN, FakeRunner, continuation, make_info, make_request

from quantd.engine.config import EngineConfig
from quantd.engine.errors import RankError
from quantd.engine.grammar import NO_GRAMMARS, Done, GrammarCompiler, Grammars
from quantd.engine.loop import EngineLoop, Incoming
from quantd.engine.messages import Abort, Add, Events, Forget, FromEngine, GetStats, Started, Stats
from quantd.engine.plan import Plan, StepOutput
from quantd.engine.request import Request, SamplingParams, TokenEvent
from quantd.engine.scheduler import Scheduler


class Harness:
    """An EngineLoop whose inbox is filled and whose frames are read by hand."""

    def __init__(
        self, runner: FakeRunner | None = None, grammars: Grammars = NO_GRAMMARS, **config: int
    ) -> None:
        self.inbox: SimpleQueue[Incoming] = SimpleQueue()
        self.sent: list[FromEngine] = []
        self.runner = runner or FakeRunner(make_info())
        scheduler = Scheduler(EngineConfig(model_path="", **config), self.runner.info)  # type: ignore[arg-type]
        self.loop = EngineLoop(
            scheduler, self.runner, self.inbox, self.sent.append, hold_seconds=0.0, grammars=grammars
        )

    def step(self, *messages: Incoming) -> list[FromEngine]:
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


def test_a_forgotten_prompt_is_computed_again() -> None:
    harness, prompt = Harness(), [1, 2, 3, 4, 5, 6]
    for name, cached in (("a", 0), ("b", 4)):
        (event,) = events(harness.step(Add(make_request(name, prompt, max_tokens=1))))
        assert event.num_cached == cached
    (event,) = events(harness.step(Forget(prompt), Add(make_request("c", prompt, max_tokens=1))))
    assert event.num_cached == 0


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

    harness = Harness(LostRanks(make_info()))
    with pytest.raises(RankError):
        harness.step(Add(make_request("a", [1])))
    (event,) = events(harness.sent)
    assert event.error == "the step failed: rank 1 was ended by SIGKILL"


@pytest.mark.parametrize(
    "fault",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: misaligned address"),
    ],
    ids=["torch", "triton"],
)
def test_a_fault_of_the_gpu_ends_the_loop_at_once_and_those_who_wait_are_not_told(fault: Exception) -> None:
    class Faulty(FakeRunner):
        def run(self, plan: Plan) -> StepOutput:
            raise fault

    harness = Harness(Faulty(make_info()), max_num_tokens=4)
    with pytest.raises(type(fault)):
        harness.step(Add(make_request("a", [1] * 9)), Add(make_request("b", [2])))
    assert [frame.request_ids for frame in harness.sent if isinstance(frame, Started)] == [["a"]]
    (event,) = events(harness.sent)
    assert (event.request_id, event.finish_reason) == ("a", "error")


class ShortOfMemory(FakeRunner):
    """Has memory for so many requests of a step, and tokens."""

    requests, tokens = 64, 512

    def run(self, plan: Plan) -> StepOutput:
        if len(plan.entries) > self.requests or plan.num_tokens > self.tokens:
            self.plans.append(plan)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64.00 MiB.")
        return super().run(plan)

    @property
    def sizes(self) -> list[int]:
        return [plan.num_tokens for plan in self.plans]


def serve(harness: Harness, *requests: Request) -> None:
    """To their ends, which are what they would be alone."""
    seen = events(harness.step(*map(Add, requests)))
    while harness.loop.scheduler.has_work:
        harness.loop.scheduler.check()
        seen += events(harness.step())
    for request in requests:
        tokens = [token for event in seen if event.request_id == request.id for token in event.token_ids]
        assert tokens == continuation(request, make_info())[0]


def test_a_step_without_memory_is_done_again_with_half_its_tokens() -> None:
    runner = ShortOfMemory(make_info())
    runner.tokens = 20
    serve(Harness(runner), make_request("a", range(60), max_tokens=2))
    assert runner.sizes == [60, 30, 16, 16, 16, 12, 1]


def test_steps_grow_again_when_requests_have_ended() -> None:
    runner = ShortOfMemory(make_info())
    harness = Harness(runner)
    runner.tokens = 20
    serve(harness, make_request("a", range(30), max_tokens=1))
    runner.plans.clear()
    runner.tokens = 512
    for name, sizes in (("b", [32, 32, 26]), ("c", [64, 26]), ("d", [90])):
        serve(harness, make_request(name, [i % 60 for i in range(90)], salt=name, max_tokens=1))
        assert runner.sizes == sizes
        runner.plans.clear()


def test_a_step_that_cannot_have_fewer_tokens_is_done_again_without_its_youngest_request() -> None:
    """All have one prompt, so that the later ones were promised blocks which that step did not fill."""
    runner = ShortOfMemory(make_info())
    harness = Harness(runner)
    runner.requests = 2
    serve(harness, *(make_request(name, [*range(10), i], max_tokens=3 + i) for i, name in enumerate("abcd")))
    assert [len(plan.entries) for plan in runner.plans][:4] == [4, 3, 2, 2]
    assert harness.loop.scheduler.counters.preemptions >= 2


def test_one_that_runs_keeps_what_it_has_when_memory_is_wanting() -> None:
    runner = ShortOfMemory(make_info())
    harness = Harness(runner)
    runner.requests = 1
    harness.step(Add(make_request("old", range(30), max_tokens=5)))
    new = make_request("new", range(30, 50), max_tokens=2)
    seen = [event for message in ([Add(new)], [], []) for event in events(harness.step(*message))]
    harness.loop.scheduler.check()
    assert [(event.request_id, len(event.token_ids)) for event in seen] == [("old", 1)]
    assert runner.sizes == [30, 21, 16, 1]
    while harness.loop.scheduler.has_work:
        seen += events(harness.step())
    assert [event.finish_reason for event in seen if event.finish_reason] == ["length", "length"]


def test_a_request_that_alone_finds_no_memory_ends_and_a_smaller_one_is_served() -> None:
    runner = ShortOfMemory(make_info())
    harness = Harness(runner)
    runner.tokens = 10
    (event,) = [
        event
        for message in ([Add(make_request("a", range(60)))], [], [])
        for event in events(harness.step(*message))
    ]
    assert event.error is not None and "out of memory" in event.error
    serve(harness, make_request("b", range(3), max_tokens=2))


def test_while_nothing_comes_the_runner_prepares() -> None:
    class Preparing(FakeRunner):
        left = 3

        def prepare(self) -> bool:
            self.left -= 1
            if self.left == 1:
                harness.inbox.put(GetStats())
            return self.left > 0

    runner = Preparing(make_info())
    harness = Harness(runner)
    (stats,) = harness.step()
    assert isinstance(stats, Stats)
    assert runner.left == 1


TOKENIZER = Path(__file__).parents[1] / "data" / "tokenizer"
WORD = {"grammar": 'start: "a"', "stop_token_ids": (2,), "max_tokens": 2}


class SlowGrammars:
    """Keeps what is to be compiled until the test says what comes of it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[SamplingParams, Done]] = []

    def compile(self, sampling: SamplingParams, done: Done) -> None:
        self.waiting.append((sampling, done))

    def finish(self, times: int = 1) -> None:
        sampling, done = self.waiting.pop(0)
        for _ in range(times):
            done(GrammarCompiler(TOKENIZER, vocab_size=512).matcher(sampling))


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    harness = Harness(grammars=(grammars := SlowGrammars()))
    slow, other = make_request("slow", [1, 2], **WORD), make_request("other", [3, 4], max_tokens=2)
    seen = events(harness.step(Add(slow), Add(other))) + events(harness.step())
    assert [event.request_id for event in seen] == ["other", "other"]
    assert not harness.loop.scheduler.has_work
    (stats,) = harness.step(GetStats())
    assert isinstance(stats, Stats)
    assert (stats.num_waiting, stats.num_running) == (1, 0)
    # A second result, as when one comes just before it would be late, changes nothing.
    grammars.finish(times=2)
    seen = events(harness.step()) + events(harness.step())
    assert [event.request_id for event in seen] == ["slow", "slow"]
    harness.loop.scheduler.check()


def test_a_request_that_ends_while_its_grammar_is_compiled_stays_ended() -> None:
    harness = Harness(grammars=(grammars := SlowGrammars()))
    harness.inbox.put(Abort("a"))
    (event,) = events(harness.step(Add(make_request("a", [1, 2], **WORD)), Abort("a")))
    assert event.finish_reason == "abort"
    grammars.finish()
    assert events(harness.step(GetStats())) == []
    assert not harness.loop.scheduler.has_work


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone() -> None:
    harness = Harness()
    request, other = make_request("a", [1, 2], **WORD), make_request("b", [3], max_tokens=1)
    seen = {event.request_id: event for event in events(harness.step(Add(request), Add(other)))}
    seen |= {event.request_id: event for event in events(harness.step(GetStats()))}
    assert (seen["a"].finish_reason, seen["a"].error) == ("error", "this engine knows no grammars")
    assert seen["b"].finish_reason == "length"
