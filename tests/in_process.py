"""An engine without processes: the real scheduler around a runner, stepped by the test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quantd.engine.config import EngineConfig
from quantd.engine.plan import Runner
from quantd.engine.request import Request, TokenEvent, TokenLogprob
from quantd.engine.scheduler import Scheduler


@dataclass
class Completion:
    """All that a request's events said."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes | None = None
    num_cached: int | None = None
    finish_reason: str | None = None
    error: str | None = None

    def add(self, event: TokenEvent) -> None:
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        self.num_cached = event.num_cached if self.num_cached is None else self.num_cached
        self.embedding = event.embedding
        self.finish_reason, self.error = event.finish_reason, event.error


class InProcessEngine:
    """Serves requests to their end and checks the block pool after every step."""

    def __init__(self, config: EngineConfig, runner: Runner) -> None:
        self.runner = runner
        self.scheduler = Scheduler(config, runner.info)

    def serve(self, requests: Iterable[Request]) -> list[Completion]:
        """All at once, continuous batching; completions in the order of the requests."""
        completions: dict[str, Completion] = {}
        for request in requests:
            completions[request.id] = Completion()
            refusal = self.scheduler.add(request)
            if refusal is not None:
                completions[request.id].add(refusal)
        while self.scheduler.has_work:
            for event in self.step():
                completions[event.request_id].add(event)
        return list(completions.values())

    def serve_alone(self, requests: Iterable[Request]) -> list[Completion]:
        """One after another."""
        return [self.serve([request])[0] for request in requests]

    def step(self) -> list[TokenEvent]:
        plan = self.scheduler.schedule()
        events = self.scheduler.update(plan, self.runner.run(plan))
        self.scheduler.check()
        return events
