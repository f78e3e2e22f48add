"""Steps that are started before the one before them has ended give what steps in turn give."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import pytest
from fakes import (
    FAULTY_TOKEN,
    AheadFakeRunner,
    FakeRunner,
    FakeStarted,
    continuation,
    make_embedding_request,
    make_info,
    make_request,
)
from hypothesis import given
from hypothesis import strategies as st

from quantd.engine.config import EngineConfig
from quantd.engine.grammar import Matcher
from quantd.engine.messages import ModelInfo
from quantd.engine.plan import AheadRunner, Plan
from quantd.engine.request import Request, ThinkingBudget, TokenEvent
from quantd.engine.scheduler import Scheduler
from quantd.engine.step_limits import LEAST_TOKENS
from quantd.engine.stepping import InTurn, OneAhead, stepping_of


class Engine:
    """A scheduler and a runner that goes ahead, stepped by hand; audited after each step."""

    def __init__(self, num_blocks: int = 64, runner: AheadFakeRunner | None = None, **config: int) -> None:
        info = make_info(num_blocks=num_blocks)
        self.runner = runner or AheadFakeRunner(info)
        self.scheduler = Scheduler(EngineConfig(model_path="", **config), info)  # type: ignore[arg-type]
        self.stepping = stepping_of(self.scheduler, self.runner)
        self._num_reserved = -(-self.scheduler.limits.num_tokens // info.block_size)
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)

    def add(self, *requests: Request) -> None:
        for request in requests:
            assert self.scheduler.add(request) is None

    def abort(self, name: str) -> None:
        self._note([event] if (event := self.scheduler.abort(name)) else [])
        self.scheduler.check(self._num_reserved)

    def step(self) -> Plan:
        plan = self.stepping.next_plan()
        assert plan.entries
        try:
            self._note(self.scheduler.update(plan, self.stepping.run(plan)))
        except MemoryError as error:
            if not self.scheduler.put_off(plan):
                self._note(self.scheduler.fail(plan, str(error)))
        self.scheduler.check(self._num_reserved)
        return plan

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
        stats = self.scheduler.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total

    def output(self, name: str) -> list[int]:
        return [token for event in self.events[name] for token in event.token_ids]

    def _note(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.events[event.request_id].append(event)


def num_ahead(runner: FakeRunner) -> int:
    return sum(entry.ahead for plan in runner.plans for entry in plan.entries)


def test_a_runner_that_cannot_go_ahead_runs_in_turn() -> None:
    info = make_info()
    scheduler = Scheduler(EngineConfig(model_path=""), info)
    assert isinstance(stepping_of(scheduler, FakeRunner(info)), InTurn)
    assert isinstance(AheadFakeRunner(info), AheadRunner)
    assert isinstance(stepping_of(scheduler, AheadFakeRunner(info)), OneAhead)


def test_every_decode_step_is_started_ahead() -> None:
    engine = Engine()
    engine.add(*(make_request(name, [1, ord(name) - 90, 3], max_tokens=9) for name in "abc"))
    engine.finish()
    assert num_ahead(engine.runner) == 3 * 8
    assert engine.scheduler.counters.steps == len(engine.runner.plans) == 9
    for name in "abc":
        request = make_request(name, [1, ord(name) - 90, 3], max_tokens=9)
        assert engine.output(name) == continuation(request, engine.scheduler.info)[0]


def test_a_request_that_stops_leaves_the_step_that_was_started_with_it() -> None:
    engine = Engine()
    info = engine.scheduler.info
    output, _ = continuation(make_request("a", [1, 2, 3], max_tokens=9), info)
    engine.add(make_request("a", [1, 2, 3], max_tokens=9, stop_token_ids=(output[3],)))
    engine.add(make_request("b", [7, 2, 3], max_tokens=9))
    engine.finish()
    assert engine.output("a") == output[: output.index(output[3]) + 1]
    assert [len(event.token_ids) for event in engine.events["a"]] == [1] * len(engine.output("a"))
    assert engine.output("b") == continuation(make_request("b", [7, 2, 3], max_tokens=9), info)[0]


def test_one_that_comes_waits_for_the_step_that_is_under_way_and_no_longer() -> None:
    engine = Engine()
    engine.add(make_request("a", [1, 2, 3], max_tokens=20))
    engine.step()
    engine.add(make_request("b", [4, 5], max_tokens=3))
    names = [[entry.request.id for entry in engine.step().entries] for _ in range(2)]
    assert names == [["a"], ["a", "b"]]
    engine.finish()


def test_an_abort_takes_its_part_of_the_step_under_way() -> None:
    engine = Engine()
    engine.add(*(make_request(name, [ord(name) - 90] * 3, max_tokens=20) for name in "ab"))
    engine.step()
    engine.abort("a")
    assert [entry.request.id for entry in engine.step().entries] == ["b"]
    engine.finish()
    request = make_request("b", [ord("b") - 90] * 3, max_tokens=20)
    assert engine.output("b") == continuation(request, engine.scheduler.info)[0]


@pytest.mark.parametrize(
    ("sampling", "ahead"),
    [
        ({"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5}, [1, 1, 1, 1]),
        ({"logit_bias": {5: 1.0}, "min_tokens": 2, "seed": 1, "logprobs": 2}, [1, 1, 1, 1]),
        ({"grammar": "start: /a*/", "stop_token_ids": (63,)}, [0, 0, 0, 0]),
        ({"thinking": ThinkingBudget(9, closing=63)}, [1, 1, 1, 1]),
        ({"thinking": ThinkingBudget(3, closing=63)}, [1, 1, 0, 0]),
        ({"thinking": ThinkingBudget(0, closing=63, opening=62)}, [0, 0, 0, 0]),
    ],
    ids=str,
)
def test_a_step_waits_only_for_a_token_after_which_not_all_may_come(
    sampling: dict[str, Any], ahead: list[int]
) -> None:
    engine = Engine()
    engine.add(make_request("b", [4], max_tokens=5, **sampling))
    for state in list(engine.scheduler.held):
        engine.scheduler.release(state.id, cast(Matcher, Endless()))
    engine.finish()
    assert engine.runner.started_ahead == [False, *map(bool, ahead)]


class Endless:
    """Of a grammar that is never complete."""

    def is_over(self, output: Sequence[int]) -> bool:
        return False


@given(
    st.integers(0, 7), st.sampled_from([None, 1]), st.lists(st.integers(0, 3), max_size=9), st.integers(0, 3)
)
def test_a_step_whose_token_may_be_forced_is_never_started_ahead(
    num_tokens: int, opening: int | None, output: list[int], latest: int
) -> None:
    """Of four tokens one opens and one closes; where any of them is forced next, and only there."""
    budget = ThinkingBudget(num_tokens, closing=0, opening=opening)
    may = any(budget.forced([*output, token]) is not None for token in range(4))
    assert budget.may_force(output) == may >= (budget.forced([*output, latest]) is not None)


def test_chunks_of_a_prompt_are_started_ahead_beside_tokens_that_are_drawn() -> None:
    engine = Engine(max_num_tokens=8)
    short, long = make_request("a", [1, 2, 3], max_tokens=9), make_request("b", list(range(40)), max_tokens=4)
    engine.add(short)
    engine.step()
    engine.add(long)
    engine.finish()
    # The first, and that into which the second request is admitted, are not.
    assert engine.runner.started_ahead == [False, True, False, *[True] * 8]
    sizes = [[entry.num_tokens for entry in plan.entries] for plan in engine.runner.plans]
    assert sizes == [[3], [1], *[[1, 7]] * 5, [1, 5], [1, 1], [1], [1]]
    for request in (short, long):
        assert engine.output(request.id) == continuation(request, engine.scheduler.info)[0]


def test_who_waits_is_waited_for_only_where_there_is_room_for_them() -> None:
    """A prompt fills every step; an urgent request would pass it, another would not."""
    engine = Engine(max_num_tokens=8)
    engine.add(make_request("a", [k % 50 for k in range(80)], max_tokens=1))
    engine.step()
    engine.add(make_request("b", [1, 2], max_tokens=1))
    for _ in range(3):
        engine.step()
    assert engine.runner.started_ahead == [False, True, True, True, True]
    engine.add(make_request("c", [1, 2], max_tokens=1, urgent=True))
    names = [[entry.request.id for entry in engine.step().entries] for _ in range(2)]
    assert names == [["a"], ["c", "a"]]
    engine.finish()


@pytest.mark.parametrize(
    "asked",
    [
        make_request("a", list(range(20)), max_tokens=1, prompt_logprobs=0),
        make_embedding_request("a", list(range(20))),
    ],
    ids=["prompt logprobs", "embedding"],
)
def test_chunks_that_go_on_from_what_comes_to_the_cpu_are_not_started_ahead(asked: Request) -> None:
    engine = Engine(max_num_tokens=8)
    engine.add(asked)
    engine.finish()
    assert engine.runner.started_ahead == [False] * 3


def test_a_faulty_request_ends_alone() -> None:
    engine = Engine()
    engine.add(make_request("a", [FAULTY_TOKEN, 2], max_tokens=5), make_request("b", [4], max_tokens=5))
    engine.finish()
    assert engine.events["a"][0].error == "a faulty token"
    assert engine.output("b") == continuation(make_request("b", [4], max_tokens=5), engine.scheduler.info)[0]


class ShortOfMemory(AheadFakeRunner):
    """Has memory for steps of so many tokens as `room` says next, and for one ahead if that is even."""

    def __init__(self, info: ModelInfo, room: Sequence[int]) -> None:
        super().__init__(info)
        self._room = iter(room)

    def start(self, plan: Plan, before: FakeStarted | None = None) -> FakeStarted:
        room = next(self._room, 64)
        if plan.num_tokens > room or (before is not None and room % 2):
            raise MemoryError("no room")
        return super().start(plan, before)


def test_a_step_that_has_begun_counts_though_there_is_no_memory_for_the_next() -> None:
    engine = Engine(runner=ShortOfMemory(make_info(), [64, 63, 64, 64, 63, 64]))
    engine.add(*(make_request(name, [ord(name) - 90, 3], max_tokens=6) for name in "ab"))
    engine.step()
    assert [len(engine.output(name)) for name in "ab"] == [1, 1]
    engine.finish()
    for name in "ab":
        request = make_request(name, [ord(name) - 90, 3], max_tokens=6)
        assert engine.output(name) == continuation(request, engine.scheduler.info)[0]
    assert engine.scheduler.counters.preemptions == 0
    ahead = [{entry.ahead for entry in plan.entries} for plan in engine.runner.plans]
    assert ahead == [{False}, {False}, {True}, {False}, {True}, {True}]


REQUESTS = st.lists(
    st.tuples(
        st.integers(1, 28),  # prompt length
        st.integers(0, 12),  # max_tokens
        st.sets(st.integers(0, 60), max_size=12),  # stop ids
        st.integers(0, 25),  # comes at step
        st.one_of(st.none(), st.integers(1, 12)),  # leaves so many steps later
        st.booleans(),  # is held at some of its tokens
        st.booleans(),  # urgent
    ),
    min_size=1,
    max_size=7,
)


@given(
    REQUESTS,
    st.integers(8, 30),
    st.integers(1, 5),
    st.integers(2, 40),
    st.lists(st.integers(0, 40), max_size=20),
)
def test_any_company_gives_each_request_its_own_tokens(
    drawn: list[tuple[int, int, set[int], int, int | None, bool, bool]],
    num_blocks: int,
    max_num_requests: int,
    max_num_tokens: int,
    room: list[int],
) -> None:
    engine = Engine(
        num_blocks,
        ShortOfMemory(make_info(num_blocks=num_blocks), room),
        max_num_requests=max_num_requests,
        max_num_tokens=max(max_num_tokens, max_num_requests),
    )
    comes: dict[int, list[Request]] = defaultdict(list)
    leaves: dict[int, list[str]] = defaultdict(list)
    requests = {}
    for number, (length, max_tokens, stops, start, stays, is_held, urgent) in enumerate(drawn):
        prompt = [(number % 3 + position * position) % 50 for position in range(length)]
        held = {"thinking": ThinkingBudget(2, closing=7)} if is_held else {}
        stop_ids = tuple(sorted(stops))
        request = make_request(
            str(number), prompt, urgent=urgent, max_tokens=max_tokens, stop_token_ids=stop_ids, **held
        )
        requests[request.id] = request
        comes[start].append(request)
        if stays is not None:
            leaves[start + stays].append(request.id)
    for step in range(40):
        engine.add(*comes[step])
        for name in leaves[step]:
            engine.abort(name)
        if engine.scheduler.has_work:
            engine.step()
    engine.finish()
    for name, request in requests.items():
        whole, reason = continuation(request, engine.scheduler.info)
        end = engine.events[name][-1].finish_reason
        assert end == reason or end in ("abort", "error")
        assert engine.output(name) == (whole if end == reason else whole[: len(engine.output(name))])
        assert end != "error" or min(room) < LEAST_TOKENS
