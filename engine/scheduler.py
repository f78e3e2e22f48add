"""Which tokens each step computes: queues, the token budget, chunks, preemption (torch-free).

Knows tokens, not phases: a request has known tokens and computed ones, and a step closes part of the
gap. Requests that run come first, in the order of their admission, then waiting ones, first come
first served, under one token budget. Urgent ones wait before the others, and pass a long prompt that is
being computed, to which they leave half of each step. Three things follow that nothing has to enforce:
- A decode never starves behind a prefill. A prompt that does not end in its first step has taken all
  the budget left, so nobody is admitted behind it before its last chunk, and whoever runs before it
  is served first. Each that runs takes a token or more, so no more are ever admitted than get one.
- A preempted request does not come back in the same step to lose its blocks again: it wants all it
  had and one for each that runs, and some are gone. Only what others hold can let it back in.
- Nothing waits for ever. The oldest running request can take the blocks of all the others, and no
  request outgrows the pool; with nobody running, the head of the queue always fits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

from quantd.engine.cache_manager import CacheManager
from quantd.engine.config import EngineConfig
from quantd.engine.disk_cache import NO_DISK, DiskCache
from quantd.engine.errors import RequestError
from quantd.engine.grammar import Compiled
from quantd.engine.messages import ModelInfo, Queue, RequestStats, Stats, Wait
from quantd.engine.plan import EntryOutput, Plan, PlanEntry, RequestState, StepOutput
from quantd.engine.request import FinishReason, Request, TokenEvent
from quantd.engine.step_limits import StepLimits


@dataclass
class Counters:
    """What Stats says of the past (see there)."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    aborts: int = 0
    computed_tokens: int = 0


class Scheduler:
    """Requests in, plans out; step outputs in, events out.

    Calls must alternate: schedule, then update, put_off or fail. Between the two the plan that will follow
    may be asked for, and if that is not None, `confirm` goes in the place of the next schedule.
    """

    def __init__(self, config: EngineConfig, info: ModelInfo, disk: DiskCache = NO_DISK) -> None:
        self.info = info
        self.disk = disk
        self.cache = CacheManager(info.num_blocks, info.block_size, config.prefix_caching)
        self.limits = StepLimits(config.max_num_tokens, config.max_num_requests)
        self.running: list[RequestState] = []
        self.waiting: deque[RequestState] = deque()
        self.held: list[RequestState] = []
        self.counters = Counters()
        self._admitted: list[str] = []
        self._waits_for: Wait = ""

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> TokenEvent | None:
        """Queue a request; one that could never be served is refused by the event returned.

        One with a grammar is held until `release`, one of which the disk has a part until `resume`; there is
        no work for it before.
        """
        assert all(state.id != request.id for state in self._states()), (
            f"request {request.id} is here already"
        )
        try:
            self.info.check_request(request)
        except RequestError as error:
            return TokenEvent(request_id=request.id, finish_reason="error", error=str(error))
        if request.sampling.grammar is None:
            self._queue(RequestState(request))
        else:
            self.held.append(RequestState(request))
        return None

    def release(self, request_id: str, compiled: Compiled) -> TokenEvent | None:
        """Queue a held request, or end it by the event returned. One that is not held stays as it is."""
        state = next((state for state in self.held if state.id == request_id), None)
        if state is None:
            return None
        if isinstance(compiled, RequestError):
            return self._fail(state, str(compiled))
        state.matcher = compiled
        self.held.remove(state)
        self._queue(state)
        return None

    def resume(self, state: RequestState) -> None:
        """Queue a request that is held for what the disk has of it, unless it has ended."""
        if state in self.held:
            self.held.remove(state)
            self._wait(state)

    def abort(self, request_id: str) -> TokenEvent | None:
        """End a request between steps, whatever its state; its blocks are free at once."""
        state = next((state for state in self._states() if state.id == request_id), None)
        if state is None:
            return None
        self.counters.aborts += 1
        self._remove(state)
        return TokenEvent(request_id=request_id, finish_reason="abort")

    def schedule(self) -> Plan:
        """Plan the next step. Not empty while there is work."""
        entries: list[PlanEntry] = []
        self._let_pass()
        self._plan_running(entries)
        self._plan_waiting(entries)
        assert entries or not self.has_work, "no request can move"
        self.counters.steps += 1
        return Plan(tuple(entries))

    def ahead(self, plan: Plan) -> Plan | None:
        """The plan that follows `plan` if nobody ends sooner than they must; None where that cannot be said.

        It can while all that goes on needs nothing of what the step gives but the tokens that it draws, and
        nobody is to be admitted. Blocks that a request gets for it it keeps.
        """
        going = [entry for entry in plan.entries if not self._ends(entry)]
        if len(plan.entries) < len(self.running) or not all(map(_is_foreseeable, going)):
            return None
        sizes = self._sizes(going)
        if not sizes or 0 in sizes or self._may_admit(len(going), self.limits.num_tokens - sum(sizes)):
            return None
        pairs = list(zip(going, sizes, strict=True))
        if not all(self.cache.reserve(entry.request, entry.stop + size) for entry, size in pairs):
            return None
        return Plan(tuple(entry.following(size) for entry, size in pairs))

    def confirm(self, ahead: Plan) -> Plan:
        """The plan that was foreseen, without the requests that have ended since."""
        entries = [self._confirm(entry) for entry in ahead.entries if entry.request in self.running]
        self.counters.steps += bool(entries)
        return Plan(tuple(entries))

    def take_admitted(self) -> list[str]:
        """The requests admitted for the first time since the last call."""
        admitted, self._admitted = self._admitted, []
        return admitted

    def update(self, plan: Plan, output: StepOutput) -> list[TokenEvent]:
        """Take in what a step gave; requests that end hold nothing afterwards."""
        pairs = zip(plan.entries, output.entries, strict=True)
        events = [self._update(entry, entry_output) for entry, entry_output in pairs]
        return [event for event in events if event is not None]

    def put_off(self, plan: Plan) -> bool:
        """Take back a step for which memory was wanting, to go on with a smaller one.

        The next has half as many tokens; where that leaves no request less, the youngest waits. Until others
        end, no step is larger. False, and nothing is done, where it is as small as can be.
        """
        smaller = self.limits.halve(plan.num_tokens, len(self.running))
        if not smaller and len(plan.entries) < 2:
            return False
        size = self.cache.block_size
        unfilled = {block for entry in plan.entries for block in entry.blocks[entry.start // size :]}
        # Who was just admitted may have been promised blocks of this very step.
        waits = {e.request.id for e in plan.entries if unfilled.intersection(e.blocks[: e.start // size])}
        if not smaller:
            self.limits.num_requests = len(self.running) - 1
            waits.add(plan.entries[-1].request.id)
        for entry in reversed(plan.entries):
            self.cache.undo(entry.request)
            if entry.request.id in waits:
                self.running.remove(entry.request)
                self._preempt(entry.request)
        return True

    def fail(self, plan: Plan, error: str) -> list[TokenEvent]:
        """End all requests of a step that could not be computed."""
        return [self._fail(entry.request, error) for entry in plan.entries]

    def stats(self, detail: bool = False) -> Stats:
        """The counters and the present state, and `detail` of each request and the pool's parts."""
        num_cached = self.cache.num_cached
        return Stats(
            waits_for=self._waits_for if self.waiting else "",
            num_running=len(self.running),
            num_waiting=len(self.waiting) + len(self.held),
            blocks_total=self.info.num_blocks,
            blocks_free=self.cache.pool.num_free - num_cached,
            blocks_cached=num_cached,
            blocks_touched=self.cache.pool.num_touched,
            live_slots=self._live_slots(),
            disk_hits=self.disk.num_read * self.info.block_size,
            evictions=self.cache.num_evictions,
            requests=list(self._request_stats()) if detail else [],
            pool=self.cache.map() if detail else None,
            **asdict(self.counters),
        )

    def check(self, num_reserved: int = 0) -> None:
        """Assert, between steps, that no block is lost, and that nothing runs beyond its limits.

        num_reserved: see CacheManager.check.
        """
        self.cache.check(self._states(), num_reserved)
        assert not any(state.blocks for state in (*self.waiting, *self.held))
        assert len(self.running) <= self.limits.max_num_requests
        limit = self.info.max_request_len
        for state in self._states():
            assert state.num_computed < state.num_tokens <= limit - state.request.draws, state

    def _request_stats(self) -> Iterator[RequestStats]:
        queues: dict[Queue, Iterable[RequestState]]
        queues = {"running": self.running, "waiting": self.waiting, "held": self.held}
        for queue, states in queues.items():
            for state in states:
                yield RequestStats(
                    id=state.id,
                    queue=queue,
                    num_tokens=state.num_tokens,
                    num_computed=state.num_computed,
                    num_blocks=len(state.blocks),
                )

    def _live_slots(self) -> int:
        size = self.info.block_size
        filled = {
            block: min(state.num_computed - index * size, size)
            for state in self.running
            for index, block in enumerate(state.blocks)
        }
        return sum(filled.values())

    def _states(self) -> Iterable[RequestState]:
        return (*self.running, *self.waiting, *self.held)

    def _queue(self, state: RequestState) -> None:
        if self.disk.fetch(state, self.cache):
            self.held.append(state)
        else:
            self._wait(state)

    def _wait(self, state: RequestState) -> None:
        """Put a request at the end of the queue, or of those in it that are urgent."""
        if state.request.urgent:
            place = next((i for i, other in enumerate(self.waiting) if not other.request.urgent), None)
            self.waiting.insert(len(self.waiting) if place is None else place, state)
        else:
            self.waiting.append(state)

    def _let_pass(self) -> None:
        """Admit an urgent request before the latest one, if that would leave it nothing of this step."""
        if not (self.waiting and self.running and self.waiting[0].request.urgent):
            return
        latest, state = self.running[-1], self.waiting[0]
        left = self.limits.num_tokens - len(self.running) + 1
        is_long = latest.num_tokens - latest.num_computed >= left
        has_seat = len(self.running) < min(self.limits.num_requests, self.limits.num_tokens)
        if latest.request.urgent or not is_long or not has_seat:
            return
        if self.cache.admit(state, headroom=len(self.running)):
            self.running.insert(-1, self.waiting.popleft())
            self._count_admission(state)

    def _plan_running(self, entries: list[PlanEntry]) -> None:
        """Plan for those that run, oldest first. Only those behind, not planned yet, can be preempted."""
        index, budget = 0, self.limits.num_tokens
        while index < len(self.running) and budget:
            state = self.running[index]
            share = _share(state, len(self.running) - 1 - index, budget)
            num_tokens = min(state.num_tokens - state.num_computed, share)
            if self._make_room(state, num_tokens):
                entries.append(PlanEntry.of(state, num_tokens))
                budget -= num_tokens
                index += 1

    def _plan_waiting(self, entries: list[PlanEntry]) -> None:
        """Admit from the queue's head while seats, budget and blocks last."""
        budget = self.limits.num_tokens - sum(entry.num_tokens for entry in entries)
        while self.waiting and budget and len(self.running) < self.limits.num_requests:
            state = self.waiting[0]
            # A block for each that runs, so that they do not need the newcomer's again in a few steps.
            if not self.cache.admit(state, headroom=len(self.running)):
                self._waits_for = "blocks"
                return
            self.running.append(self.waiting.popleft())
            self._count_admission(state)
            num_tokens = min(state.num_tokens - state.num_computed, budget)
            appended = self.cache.append(state, num_tokens)
            assert appended, f"request {state.id} was admitted without room"
            entries.append(PlanEntry.of(state, num_tokens))
            budget -= num_tokens
        self._waits_for = "tokens" if len(self.running) < self.limits.num_requests else "seat"

    def _ends(self, entry: PlanEntry) -> bool:
        """Whether an entry is surely its request's last."""
        if entry.stop < entry.request.num_tokens:
            return False
        is_full = entry.stop + 1 >= self.info.max_request_len
        most = entry.request.request.sampling.max_tokens
        return not entry.samples or is_full or entry.num_output + 1 == most

    def _sizes(self, entries: Sequence[PlanEntry]) -> list[int]:
        """How many tokens follow each of the entries in the next step."""
        sizes, budget = list[int](), self.limits.num_tokens
        for num_behind, entry in zip(reversed(range(len(entries))), entries, strict=True):
            num_left = max(entry.request.num_tokens - entry.stop, 1)
            sizes.append(min(num_left, _share(entry.request, num_behind, budget)))
            budget -= sizes[-1]
        return sizes

    def _may_admit(self, num_running: int, budget: int) -> bool:
        """Whether somebody who waits may come into a step that has so much budget left."""
        if not self.waiting or num_running >= self.limits.num_requests:
            return False
        return budget > 0 or self.waiting[0].request.urgent

    def _confirm(self, entry: PlanEntry) -> PlanEntry:
        state = entry.request
        assert state.num_computed == entry.start, f"request {state.id} did not go the foreseen way"
        appended = self.cache.append(state, entry.num_tokens)
        assert appended, f"request {state.id} has lost its block"
        return PlanEntry.of(state, entry.num_tokens)

    def _make_room(self, state: RequestState, num_tokens: int) -> bool:
        """Get a running request its blocks, by preempting from the latest on. False if that was itself."""
        while not self.cache.append(state, num_tokens):
            victim = self.running.pop()
            self._preempt(victim)
            if victim is state:
                return False
        return True

    def _preempt(self, state: RequestState) -> None:
        """Put one that runs no more back to the head of the queue, without its blocks."""
        self.cache.free(state)
        self.waiting.appendleft(state)
        self.counters.preemptions += 1

    def _count_admission(self, state: RequestState) -> None:
        """Note a request's first admission: later ones bring back what a preemption took."""
        if state.num_cached is not None:
            return
        state.num_cached, state.admitted = state.num_computed, time.monotonic()
        self._admitted.append(state.id)
        self.counters.prompt_tokens += len(state.request.prompt)
        if self.cache.prefix_caching:
            self.counters.prefix_queries += len(state.request.prompt)
            self.counters.prefix_hits += state.num_cached

    def _update(self, entry: PlanEntry, output: EntryOutput) -> TokenEvent | None:
        state = entry.request
        if output.error is not None:
            return self._fail(state, output.error)
        is_first = not state.output and not state.num_prompt_logprobs
        reports = state.request.reports_progress and not state.output
        state.num_computed = entry.start + entry.num_tokens
        self.counters.computed_tokens += entry.num_tokens
        state.num_prompt_logprobs += len(output.prompt_logprobs)
        state.hidden_sum = output.hidden_sum
        token_ids, reason = self._accept(state, output.token_ids)
        assert token_ids or not entry.samples, f"no token was drawn for request {state.id}"
        if reason is not None:
            self._remove(state)
        elif not token_ids and not output.prompt_logprobs and not reports:
            return None
        return TokenEvent(
            request_id=state.id,
            token_ids=token_ids,
            logprobs=output.logprobs[: len(token_ids)],
            prompt_logprobs=output.prompt_logprobs,
            embedding=output.embedding,
            num_cached=state.num_cached if is_first else None,
            admitted=state.admitted if is_first else None,
            num_computed=entry.start + entry.num_tokens if reports else None,
            finish_reason=reason,
        )

    def _accept(self, state: RequestState, drawn: list[int]) -> tuple[list[int], FinishReason | None]:
        """Add drawn tokens to a request, up to the one that ends it. Asked for none, it ends without."""
        if state.num_computed < state.num_tokens:
            return [], None
        accepted: list[int] = []
        reason = self._finish_reason(state)
        for token_id in drawn:
            if reason is not None:
                break
            accepted.append(token_id)
            state.output.append(token_id)
            reason = self._finish_reason(state)
        self.counters.generated_tokens += len(accepted)
        return accepted, reason

    def _finish_reason(self, state: RequestState) -> FinishReason | None:
        sampling = state.request.sampling
        if state.output and state.output[-1] in sampling.stop_token_ids:
            return "stop"
        if state.matcher is not None and state.output and state.matcher.is_over(state.output):
            return "complete"
        full = state.num_tokens == self.info.max_request_len
        return "length" if full or len(state.output) == sampling.max_tokens else None

    def _fail(self, state: RequestState, error: str) -> TokenEvent:
        """End a request whose tokens, and so the contents of its blocks, cannot be trusted."""
        self._remove(state, forget=True)
        return TokenEvent(request_id=state.id, finish_reason="error", error=error)

    def _remove(self, state: RequestState, forget: bool = False) -> None:
        self.disk.end(state, keep=not forget)
        self.cache.free(state, forget)
        next(queue for queue in (self.running, self.waiting, self.held) if state in queue).remove(state)
        self.limits.relax()


def _share(state: RequestState, num_behind: int, budget: int) -> int:
    """What one that runs may take of a budget that has a token for each behind it."""
    if not (num_behind and state.request.urgent):
        return budget
    return max(min(budget // 2, budget - num_behind), 1)


def _is_foreseeable(entry: PlanEntry) -> bool:
    """Whether what follows an entry, but for a token that it draws, is known while it computes.

    What an embedding or a prompt's log probabilities are made of comes to the CPU first; so does a token
    after which not all may come.
    """
    request = entry.request.request
    if entry.samples:
        thinking = request.sampling.thinking
        may_force = thinking is not None and thinking.may_force(entry.request.output)
        return request.sampling.grammar is None and not may_force
    return request.embedding is None and request.sampling.prompt_logprobs is None
