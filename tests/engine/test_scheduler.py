from collections import defaultdict
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import pytest
from fakes import (
    FATAL_TOKEN,
    FAULTY_TOKEN,
    FakeRunner,
    continuation,
    embedding,
    make_embedding_request,
    make_info,
    make_request,
    next_token,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from quantd.engine.config import EngineConfig
from quantd.engine.plan import EntryOutput, Plan, StepOutput
from quantd.engine.request import Request, TokenEvent
from quantd.engine.scheduler import Scheduler


class Engine:
    """A scheduler and a FakeRunner, stepped by hand; audited after each step."""

    def __init__(self, num_blocks: int = 64, max_model_len: int = 1024, **config: int | bool) -> None:
        self.info = make_info(num_blocks=num_blocks, max_model_len=max_model_len)
        self.scheduler = Scheduler(EngineConfig(model_path="", **config), self.info)  # type: ignore[arg-type]
        self.runner = FakeRunner(self.info)
        self.events: dict[str, list[TokenEvent]] = defaultdict(list)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self._note([self.scheduler.add(request)])

    def abort(self, name: str) -> None:
        self._note([self.scheduler.abort(name)])
        self.scheduler.check()

    def step(self) -> Plan:
        plan = self.scheduler.schedule()
        assert plan.entries
        assert plan.num_tokens <= self.scheduler.limits.num_tokens
        try:
            self._note(self.scheduler.update(plan, self.runner.run(plan)))
        except RuntimeError as error:
            self._note(self.scheduler.fail(plan, str(error)))
        self.scheduler.check()
        return plan

    def finish(self) -> None:
        while self.scheduler.has_work:
            self.step()
        stats = self.scheduler.stats()
        assert stats.blocks_free + stats.blocks_cached == stats.blocks_total

    def output(self, name: str) -> list[int]:
        return [token for event in self.events[name] for token in event.token_ids]

    def end(self, name: str) -> TokenEvent:
        ends = [event for event in self.events[name] if event.finish_reason is not None]
        assert len(ends) == 1
        assert ends[0] is self.events[name][-1]
        return ends[0]

    def num_cached(self, name: str) -> int | None:
        assert all(event.num_cached is None for event in self.events[name][1:])
        return self.events[name][0].num_cached

    def _note(self, events: Iterable[TokenEvent | None]) -> None:
        for event in events:
            if event is not None:
                self.events[event.request_id].append(event)


def chunks(plan: Plan) -> list[tuple[str, int, int]]:
    return [(entry.request.id, entry.start, entry.num_tokens) for entry in plan.entries]


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + position * position) % 50 for position in range(length)]


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    engine = Engine(max_num_tokens=8)
    engine.add(
        make_request("a", prompt_of(4), max_tokens=9), make_request("b", prompt_of(14, 9), max_tokens=2)
    )
    steps = [chunks(engine.step()) for _ in range(4)]
    assert steps[0] == [("a", 0, 4), ("b", 0, 4)]
    assert steps[1] == [("a", 4, 1), ("b", 4, 7)]
    assert steps[2] == [("a", 5, 1), ("b", 11, 3)]
    assert steps[3] == [("a", 6, 1), ("b", 14, 1)]
    engine.finish()
    assert (
        engine.output("b") == continuation(make_request("b", prompt_of(14, 9), max_tokens=2), engine.info)[0]
    )


def test_equal_prompts_that_arrive_together_share_blocks_within_one_step() -> None:
    engine = Engine()
    engine.add(*(make_request(name, prompt_of(13), max_tokens=5) for name in "abcd"))
    assert chunks(engine.step()) == [("a", 0, 13), ("b", 12, 1), ("c", 12, 1), ("d", 12, 1)]
    engine.finish()
    assert [engine.num_cached(name) for name in "abcd"] == [0, 12, 12, 12]
    assert engine.output("a") == engine.output("b") == engine.output("d") == continued(prompt_of(13), 5)


def test_equal_prompts_longer_than_a_step_share_them_too() -> None:
    engine = Engine(max_num_tokens=8)
    engine.add(*(make_request(name, prompt_of(21), max_tokens=3) for name in "abc"))
    assert [chunks(engine.step()) for _ in range(2)] == [[("a", 0, 8)], [("a", 8, 8)]]
    assert chunks(engine.step()) == [("a", 16, 5), ("b", 20, 1), ("c", 20, 1)]
    engine.finish()
    assert engine.output("b") == engine.output("c") == continued(prompt_of(21), 3)


def continued(prompt: list[int], num_tokens: int) -> list[int]:
    output = list[int]()
    for _ in range(num_tokens):
        output.append(next_token([*prompt, *output]))
    return output


def test_first_come_first_served() -> None:
    engine = Engine(max_num_requests=2)
    engine.add(*(make_request(name, prompt_of(5, ord(name)), max_tokens=2) for name in "abcd"))
    order = [[name for name, _, _ in chunks(engine.step())] for _ in range(4)]
    assert order == [["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"]]


def test_an_urgent_request_passes_a_long_prompt_and_leaves_it_half_of_each_step() -> None:
    engine = Engine(max_num_tokens=9)
    engine.add(make_request("a", prompt_of(1), max_tokens=9), make_request("long", prompt_of(40, 9)))
    assert chunks(engine.step()) == [("a", 0, 1), ("long", 0, 8)]
    engine.add(make_request("last", prompt_of(6, 7)), make_request("u", prompt_of(6, 5), urgent=True))
    assert chunks(engine.step()) == [("a", 1, 1), ("u", 0, 4), ("long", 8, 4)]
    assert chunks(engine.step()) == [("a", 2, 1), ("u", 4, 2), ("long", 12, 6)]
    assert chunks(engine.step()) == [("a", 3, 1), ("u", 6, 1), ("long", 18, 7)]


def test_urgent_requests_wait_before_others_and_behind_each_other() -> None:
    engine = Engine(max_num_requests=1)
    for name in ("a", "u1", "b", "u2"):
        engine.add(make_request(name, prompt_of(2, ord(name[0])), max_tokens=1, urgent=name[0] == "u"))
    assert [chunks(engine.step())[0][0] for _ in range(4)] == ["u1", "u2", "a", "b"]


def test_a_prompt_is_admitted_only_when_all_of_it_fits_with_a_block_for_each_that_runs() -> None:
    engine = Engine(num_blocks=10, max_num_tokens=8)
    engine.add(make_request("a", prompt_of(12), max_tokens=8))
    engine.add(make_request("b", prompt_of(28, 9), max_tokens=1))
    for _ in range(8):
        engine.step()
        assert [state.id for state in engine.scheduler.running] == ["a"]
    engine.finish()
    assert engine.scheduler.counters.preemptions == 0
    assert engine.end("b").finish_reason == "length"


def test_preemption_takes_the_latest_and_keeps_its_tokens() -> None:
    engine = Engine(num_blocks=7, max_num_requests=2)
    requests = [make_request(name, prompt_of(6, ord(name)), max_tokens=12) for name in "ab"]
    engine.add(*requests, make_request("waits behind", prompt_of(2), max_tokens=1))
    while not engine.scheduler.counters.preemptions:
        engine.step()
    assert [state.id for state in engine.scheduler.running] == ["a"]
    victim = engine.scheduler.waiting[0]
    assert (victim.id, victim.num_computed, victim.blocks) == ("b", 0, [])
    assert victim.output == engine.output("b") != []
    engine.finish()
    for request in requests:
        assert engine.output(request.id) == continuation(request, engine.info)[0]
        assert engine.num_cached(request.id) == 0, "its own blocks, found again, are no hit of the prompt"


@pytest.mark.parametrize(
    ("prompt_len", "max_model_len", "numbers"),
    [(32, 1024, ("32 tokens", "KV cache", "is 32")), (20, 20, ("20 tokens", "context length is 20"))],
)
def test_what_can_never_fit_is_refused_at_once(
    prompt_len: int, max_model_len: int, numbers: tuple[str, ...]
) -> None:
    engine = Engine(num_blocks=8, max_model_len=max_model_len)
    engine.add(make_request("big", prompt_of(prompt_len)), make_request("small", prompt_of(5), max_tokens=3))
    assert engine.end("big").finish_reason == "error"
    assert all(number in (engine.end("big").error or "") for number in numbers)
    engine.finish()
    assert engine.output("small") == continued(prompt_of(5), 3)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("x", []), "empty"),
        (make_request("x", [1, -1]), "token id -1 is not in 0..63"),
        (make_request("x", [1, 2**32 - 1]), "token id 4294967295"),
        (make_request("x", [1], top_p=2.0), "top_p"),
    ],
)
def test_invalid_requests_are_refused_by_name(request_: Request, message: str) -> None:
    engine = Engine()
    engine.add(request_)
    assert message in (engine.end("x").error or "")
    assert not engine.scheduler.has_work


def test_a_request_that_outgrows_the_pool_ends() -> None:
    engine = Engine(num_blocks=4)
    engine.add(make_request("a", prompt_of(6)), make_request("b", prompt_of(3)))
    engine.finish()
    for name, prompt_len in (("a", 6), ("b", 3)):
        assert engine.end(name).finish_reason == "length"
        assert prompt_len + len(engine.output(name)) == 16


def test_the_context_limit_ends_a_request_that_names_none() -> None:
    engine = Engine(max_model_len=20)
    engine.add(make_request("a", prompt_of(6)))
    engine.finish()
    assert (len(engine.output("a")), engine.end("a").finish_reason) == (14, "length")


def test_a_stop_id_ends_a_request_and_is_in_its_tokens() -> None:
    engine, expected = Engine(), continued(prompt_of(6), 4)
    stop = next(token for token in reversed(expected) if expected.count(token) == 1)
    engine.add(make_request("a", prompt_of(6), stop_token_ids=(stop,), logprobs=0))
    engine.finish()
    assert engine.end("a").finish_reason == "stop"
    assert engine.output("a") == expected[: expected.index(stop) + 1]
    assert [entry.token_id for event in engine.events["a"] for entry in event.logprobs] == engine.output("a")


def test_max_tokens_zero_computes_the_prompt_only() -> None:
    engine = Engine(max_num_tokens=8)
    engine.add(make_request("a", prompt_of(19), max_tokens=0, prompt_logprobs=0))
    engine.finish()
    assert engine.end("a").finish_reason == "length"
    assert engine.output("a") == []
    assert [entry.samples for plan in engine.runner.plans for entry in plan.entries] == [False] * 3
    assert reported_positions(engine, "a") == prompt_of(19)[1:]


def test_a_request_is_told_how_far_its_prompt_is_if_it_asks() -> None:
    engine = Engine(max_num_tokens=8)
    engine.add(make_request("first", prompt_of(8), max_tokens=0))
    engine.finish()
    request = make_request("asks", prompt_of(26), max_tokens=3)
    engine.add(msgspec.structs.replace(request, reports_progress=True))
    engine.finish()
    told = [(event.num_computed, event.num_cached, len(event.token_ids)) for event in engine.events["asks"]]
    assert told == [(16, 8, 0), (24, 8, 0), (26, 8, 1), (None, None, 1), (None, None, 1)]
    assert engine.output("asks") == continuation(request, engine.info)[0]


def reported_positions(engine: Engine, name: str) -> list[int]:
    return [entry.token_id for event in engine.events[name] for entry in event.prompt_logprobs]


@pytest.mark.parametrize("prompt_len", [15, 16, 17])
def test_prompt_logprobs_are_the_same_cold_and_warm(prompt_len: int) -> None:
    engine = Engine(max_num_tokens=6)
    for name in ("cold", "warm"):
        engine.add(make_request(name, prompt_of(prompt_len), max_tokens=2, prompt_logprobs=1))
        engine.finish()
    assert reported_positions(engine, "warm") == prompt_of(prompt_len)[1:]
    cold, warm = (
        [entry for event in engine.events[name] for entry in event.prompt_logprobs]
        for name in ("cold", "warm")
    )
    assert cold == warm
    assert engine.num_cached("warm") == 0


def test_an_entry_error_ends_that_request_alone() -> None:
    engine = Engine()
    engine.add(
        make_request("bad", [*prompt_of(9), FAULTY_TOKEN]), make_request("good", prompt_of(9), max_tokens=3)
    )
    engine.finish()
    assert (engine.end("bad").finish_reason, engine.end("bad").error) == ("error", "a faulty token")
    assert engine.output("good") == continued(prompt_of(9), 3)
    assert engine.scheduler.stats().blocks_cached < 3, "the blocks of the bad one are forgotten"


def test_a_failed_step_leaves_no_block_that_was_never_written() -> None:
    engine = Engine(max_num_tokens=16)
    engine.add(make_request("a", [*prompt_of(15), FATAL_TOKEN]))
    engine.add(make_request("b", prompt_of(15), max_tokens=3))
    engine.step()
    assert engine.end("a").error == "the step broke"
    engine.finish()
    assert engine.num_cached("b") == 0
    assert engine.output("b") == continued(prompt_of(15), 3)


def test_abort_frees_at_once_in_any_state() -> None:
    engine = Engine(max_num_tokens=8, max_num_requests=2)
    engine.add(make_request("decoding", prompt_of(4)), make_request("in prefill", prompt_of(30, 7)))
    engine.add(make_request("waiting", prompt_of(4)))
    engine.step()
    for name in ("in prefill", "waiting", "decoding"):
        engine.abort(name)
        assert engine.end(name).finish_reason == "abort"
    engine.abort("nobody")
    assert not engine.scheduler.has_work
    stats = engine.scheduler.stats()
    assert stats.blocks_free + stats.blocks_cached == stats.blocks_total
    assert stats.aborts == 3


def test_drawn_tokens_after_the_end_are_dropped() -> None:
    engine = Engine()
    engine.add(make_request("a", prompt_of(4), max_tokens=2))
    plan = engine.scheduler.schedule()
    (event,) = engine.scheduler.update(plan, StepOutput((EntryOutput([5, 6, 7]),)))
    assert (event.token_ids, event.finish_reason) == ([5, 6], "length")


def test_stats_count() -> None:
    engine = Engine()
    for name in "ab":
        engine.add(make_request(name, prompt_of(13), max_tokens=3))
        engine.finish()
    stats = engine.scheduler.stats()
    assert (stats.steps, stats.prompt_tokens, stats.generated_tokens) == (6, 26, 6)
    assert stats.computed_tokens == (13 + 2) + (1 + 2), "a drawn token is computed in the next step"
    assert (stats.prefix_queries, stats.prefix_hits) == (26, 12)
    assert (stats.blocks_total, stats.blocks_free + stats.blocks_cached) == (64, 64)


def test_stats_tell_of_each_request_and_of_the_pools_parts_where_asked() -> None:
    engine = Engine(num_blocks=1030, max_num_tokens=10, max_num_requests=2)
    engine.add(make_request("a", prompt_of(4), max_tokens=9))
    engine.add(make_request("b", prompt_of(30, 7), max_tokens=9), make_request("c", prompt_of(4, 9)))
    engine.step()
    plain, stats = engine.scheduler.stats(), engine.scheduler.stats(detail=True)
    assert msgspec.structs.replace(stats, requests=[], pool=None) == plain
    states = [(s.id, s.queue, s.num_tokens, s.num_computed, s.num_blocks) for s in stats.requests]
    assert states == [("a", "running", 5, 4, 1), ("b", "running", 30, 6, 2), ("c", "waiting", 4, 0, 0)]
    assert stats.pool is not None and stats.pool.blocks_per_cell == 3
    assert len(stats.pool.held) == len(stats.pool.cached) == 344
    assert (stats.pool.held[0], sum(stats.pool.held), sum(stats.pool.cached)) == (3, 3, 0)
    engine.finish()
    pool = engine.scheduler.stats(detail=True).pool
    assert pool is not None and not any(pool.held)
    assert sum(pool.cached) == engine.scheduler.stats().blocks_cached > 9


def test_slots_that_requests_share_are_live_once() -> None:
    engine = Engine()
    engine.add(*(make_request(name, prompt_of(13), max_tokens=5) for name in "ab"))
    for expected in (12 + 2, 12 + 4):
        engine.step()
        assert engine.scheduler.stats().live_slots == expected
    engine.finish()
    assert engine.scheduler.stats().live_slots == 0


# Few distinct tokens and lengths around the block size, so that prefixes collide, end inside blocks
# and at their edges; pools so small that every other trace preempts.
PROMPTS = st.builds(
    lambda stem, tail: [1, 2, 3, 4, 5, 6, 7, 8, 9][:stem] + tail,
    st.integers(0, 9),
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "salt": st.sampled_from(["", "", "x"]),
        "urgent": st.sampled_from([False, False, True]),
        "max_tokens": st.one_of(st.none(), st.integers(0, 12)),
        "prompt_logprobs": st.sampled_from([None, None, 0]),
        "stop_token_ids": st.sampled_from([(), tuple(range(6))]),
        "fault": st.sampled_from([None] * 12 + [FAULTY_TOKEN, FATAL_TOKEN]),
        "embedding": st.sampled_from(
            [None] * 6
            + [
                {"pooling": "mean"},
                {"pooling": "mean", "dimensions": 2, "normalize": False},
                {"pooling": "last"},
                {"pooling": "first"},
            ]
        ),
    }
)
MOVES = st.lists(
    st.one_of(
        REQUESTS.map(lambda fields: ("add", fields)),
        st.integers(1, 4).map(lambda count: ("step", count)),
        st.integers(0, 20).map(lambda number: ("abort", number)),
    ),
    max_size=30,
)


@settings(max_examples=2000, deadline=None)
@given(
    moves=MOVES,
    num_blocks=st.integers(2, 14),
    max_num_tokens=st.integers(1, 20),
    max_num_requests=st.integers(1, 6),
    prefix_caching=st.sampled_from([True, True, True, False]),
)
def test_any_trace_adds_up_and_gives_each_request_what_it_would_get_alone(
    moves: list[tuple[str, object]],
    num_blocks: int,
    max_num_tokens: int,
    max_num_requests: int,
    prefix_caching: bool,
) -> None:
    engine = Engine(
        num_blocks=num_blocks,
        max_num_tokens=max_num_tokens,
        max_num_requests=max_num_requests,
        prefix_caching=prefix_caching,
        max_model_len=40,
    )
    requests: dict[str, Request] = {}
    for move, value in moves:
        PLAY[move](engine, requests, value)
    limit = 60 * len(requests)
    while engine.scheduler.has_work:
        step_fairly(engine)
        limit -= 1
        assert limit, "some request waits for ever"
    engine.finish()
    for request in requests.values():
        assert_ended_right(engine, request)


def play_add(engine: Engine, requests: dict[str, Request], fields: dict[str, object]) -> None:
    fields = dict(fields)
    prompt, fault = list(fields.pop("prompt")), fields.pop("fault")  # type: ignore[call-overload]
    prompt += [] if fault is None else [fault]
    name, params = f"r{len(requests)}", fields.pop("embedding")
    if params is None:
        request = make_request(name, prompt, **fields)  # type: ignore[arg-type]
    else:
        request = make_embedding_request(name, prompt, str(fields["salt"]), **params)  # type: ignore[arg-type]
        request = msgspec.structs.replace(request, urgent=bool(fields["urgent"]))
    requests[request.id] = request
    engine.add(request)


def play_step(engine: Engine, requests: dict[str, Request], count: int) -> None:
    for _ in range(count):
        if engine.scheduler.has_work:
            step_fairly(engine)


def play_abort(engine: Engine, requests: dict[str, Request], number: int) -> None:
    engine.abort(f"r{number}")


PLAY: dict[str, Callable[..., None]] = {"add": play_add, "step": play_step, "abort": play_abort}


def step_fairly(engine: Engine) -> None:
    """One step in which every request that runs gets a token at least, unless it is preempted."""
    running = list(engine.scheduler.running)
    num_preemptions = engine.scheduler.counters.preemptions
    planned = {entry.request for entry in engine.step().entries}
    num_preemptions = engine.scheduler.counters.preemptions - num_preemptions
    kept, preempted = running[: len(running) - num_preemptions], running[len(running) - num_preemptions :]
    assert planned.issuperset(kept)
    # A preempted request comes back at once if others hold equal blocks; the rest keep their turn.
    back = [state for state in preempted if state in planned]
    assert back == preempted[: len(back)]
    assert list(engine.scheduler.waiting)[: len(preempted) - len(back)] == preempted[len(back) :]


def assert_ended_right(engine: Engine, request: Request) -> None:
    end, output = engine.end(request.id), engine.output(request.id)
    expected, reason = continuation(request, engine.info)
    if end.finish_reason == "abort":
        assert output == expected[: len(output)]
    elif end.finish_reason != "error":
        assert (output, end.finish_reason) == (expected, reason)
        if request.sampling.prompt_logprobs is not None:
            assert_prompt_logprobs_right(engine, request)
        if request.embedding is not None:
            assert end.embedding is not None
            np.testing.assert_allclose(np.frombuffer(end.embedding, np.float32), embedding(request), 1e-6)
    else:
        never_fits = len(request.prompt) + request.draws > engine.info.max_request_len
        assert never_fits or end.error in ("a faulty token", "the step broke")
    if output:
        cached = engine.num_cached(request.id)
        assert cached is not None
        assert cached < len(request.prompt)


def assert_prompt_logprobs_right(engine: Engine, request: Request) -> None:
    entries = [entry for event in engine.events[request.id] for entry in event.prompt_logprobs]
    prompt = request.prompt
    assert [(entry.token_id, entry.logprob) for entry in entries] == [
        (prompt[position], float(next_token(prompt[:position]))) for position in range(1, len(prompt))
    ]


def test_what_the_head_of_the_queue_has_not_got_is_told() -> None:
    engine = Engine(num_blocks=8, max_num_tokens=4, max_num_requests=2)
    assert engine.scheduler.stats().waits_for == ""
    engine.add(make_request("a", [1] * 6, max_tokens=20), make_request("b", [2], max_tokens=8))
    engine.step()
    assert engine.scheduler.stats().waits_for == "tokens"
    engine.step()
    engine.add(make_request("c", [3], max_tokens=1))
    engine.step()
    assert engine.scheduler.stats().waits_for == "seat"
    engine.abort("b")
    engine.abort("c")
    engine.add(make_request("d", [4] * 24, max_tokens=1))
    engine.step()
    assert engine.scheduler.stats().waits_for == "blocks"
    engine.finish()
    assert engine.scheduler.stats().waits_for == ""


def test_each_request_is_told_once_when_it_begins() -> None:
    engine = Engine(num_blocks=6, max_num_tokens=8)
    names = [f"r{n}" for n in range(4)]
    engine.add(*(make_request(name, [n] * 5, max_tokens=12) for n, name in enumerate(names)))
    begun: list[str] = []
    while engine.scheduler.has_work:
        engine.step()
        begun += engine.scheduler.take_admitted()
    assert begun == names and engine.scheduler.counters.preemptions


def test_blocks_touched_are_all_that_were_ever_used() -> None:
    engine = Engine(num_blocks=16)
    touched: set[int] = set()
    for n in range(12):
        engine.add(make_request(f"r{n}", [n % 5] * (1 + 3 * n % 11), max_tokens=1 + n % 4))
        while engine.scheduler.has_work:
            plan = engine.scheduler.schedule()
            touched |= {block for entry in plan.entries for block in entry.blocks}
            engine.scheduler.update(plan, engine.runner.run(plan))
            assert engine.scheduler.stats().blocks_touched == len(touched)
