"""An engine without processes: the real scheduler around a runner, stepped by the test."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from quantd.engine.config import EngineConfig
from quantd.engine.errors import RequestError
from quantd.engine.faults import is_out_of_memory
from quantd.engine.grammar import GrammarCompiler
from quantd.engine.plan import Runner
from quantd.engine.request import Request, TokenEvent, TokenLogprob
from quantd.engine.scheduler import Scheduler
from quantd.engine.stepping import OneAhead, stepping_of


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
    """Serves requests to their end and checks the block pool after every step.

    num_blocks: of the runner's pool, to be used of it; None: all.
    """

    def __init__(self, config: EngineConfig, runner: Runner, num_blocks: int | None = None) -> None:
        info = runner.info if num_blocks is None else replace(runner.info, num_blocks=num_blocks)
        self.runner = runner
        self.scheduler = Scheduler(config, info)
        self._stepping = stepping_of(self.scheduler, runner)
        goes_ahead = isinstance(self._stepping, OneAhead)
        self._num_reserved = -(-config.max_num_tokens // info.block_size) * goes_ahead
        self._compiler = GrammarCompiler(Path(config.model_path), info.vocab_size)

    def serve(self, requests: Iterable[Request]) -> list[Completion]:
        """All at once, continuous batching; completions in the order of the requests."""
        completions: dict[str, Completion] = {}
        for request in requests:
            completions[request.id] = Completion()
            refusal = self._add(request)
            if refusal is not None:
                completions[request.id].add(refusal)
        while self.scheduler.has_work:
            for event in self.step():
                completions[event.request_id].add(event)
        return list(completions.values())

    def serve_alone(self, requests: Iterable[Request]) -> list[Completion]:
        """One after another."""
        return [self.serve([request])[0] for request in requests]

    def _add(self, request: Request) -> TokenEvent | None:
        """Its grammar, if it has one, is compiled on the spot."""
        refusal = self.scheduler.add(request)
        if refusal is not None or request.sampling.grammar is None:
            return refusal
        try:
            return self.scheduler.release(request.id, self._compiler.matcher(request.sampling))
        except RequestError as error:
            return self.scheduler.release(request.id, error)

    def step(self) -> list[TokenEvent]:
        plan = self._stepping.next_plan()
        try:
            events = self.scheduler.update(plan, self._stepping.run(plan))
        except Exception as error:
            if not (is_out_of_memory(error) and self.scheduler.put_off(plan)):
                raise
            events = []
        self.scheduler.check(self._num_reserved)
        return events
