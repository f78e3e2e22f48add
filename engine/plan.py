"""What passes between scheduler and runner: RequestState, Plan, StepOutput; Runner (torch-free)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import SystemRandom
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from quantd.engine.messages import ModelInfo
from quantd.engine.request import Request, TokenLogprob
from quantd.engine.token_counts import TokenCounts

if TYPE_CHECKING:
    from quantd.engine.grammar import Matcher

HiddenSum: TypeAlias = npt.NDArray[np.float64]
"""The sum of some tokens' hidden states, [H]."""


@dataclass(eq=False)
class RequestState:
    """A request inside an engine: what it asked, what it has so far, how far it is computed.

    output: tokens generated. num_computed: tokens (of prompt + output) whose keys and values are in
    the pool; preemption sets it back to 0. blocks: the request's block table, and block_keys: the
    prefix-cache keys of its full blocks, both owned by CacheManager. seed: of its random stream, a
    fresh one where it asked for none. num_prompt_logprobs: how many the runner has given (Scheduler
    counts them), so that a recomputed prompt gives none twice. num_cached: prompt tokens found in the
    prefix cache at the first admission, at the time `admitted`; None before it. hidden_sum: of computed
    tokens that an embedding is made of, as the latest step left it. matcher: of its grammar, if it has one;
    follows the output.
    """

    request: Request
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    seed: int = field(init=False)
    num_prompt_logprobs: int = 0
    block_keys: list[bytes] = field(default_factory=list)
    num_cached: int | None = None
    admitted: float | None = None
    hidden_sum: HiddenSum | None = None
    matcher: Matcher | None = None

    def __post_init__(self) -> None:
        asked = self.request.sampling.seed
        self.seed = SystemRandom().getrandbits(63) if asked is None else asked

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def forced(self) -> int | None:
        """The token that comes next whatever the model says."""
        thinking = self.request.sampling.thinking
        return None if thinking is None else thinking.forced(self.output)

    @property
    def is_held(self) -> bool:
        """Whether only some tokens may come next."""
        return self.matcher is not None or self.forced is not None

    @property
    def token_counts(self) -> TokenCounts:
        """What it has so far; kept, so to be asked for by one thread."""
        self._token_counts.follow(self.output)
        return self._token_counts

    @cached_property
    def _token_counts(self) -> TokenCounts:
        return TokenCounts(self.request.prompt)

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output."""
        return len(self.request.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Known tokens of positions start..stop-1."""
        prompt = self.request.prompt
        if stop <= len(prompt):
            return prompt[start:stop]
        return (prompt[start:] if start < len(prompt) else []) + self.output[
            max(start - len(prompt), 0) : stop - len(prompt)
        ]


@dataclass(frozen=True)
class PlanEntry:
    """Compute tokens start .. start + num_tokens - 1 of a request.

    samples: the chunk ends at the request's last token, so a new one is drawn after it. blocks: ids of the
    blocks that hold positions 0 .. start + num_tokens - 1. ahead: the one token to compute is what the
    step before draws for this request, and nobody knows it yet.
    """

    request: RequestState
    start: int
    num_tokens: int
    samples: bool
    blocks: Sequence[int]
    ahead: bool = False

    @classmethod
    def of(cls, state: RequestState, num_tokens: int) -> PlanEntry:
        """The chunk of a request that comes next. At its last known token one is drawn, if one is wanted."""
        start = state.num_computed
        samples = start + num_tokens == state.num_tokens and state.request.draws
        return cls(state, start, num_tokens, samples, tuple(state.blocks))

    def following(self, num_tokens: int) -> PlanEntry:
        """The chunk that comes after this one, of so many tokens: the one that is drawn, or known ones."""
        state, start = self.request, self.stop
        samples = start + num_tokens >= state.num_tokens and state.request.draws
        return PlanEntry(state, start, num_tokens, samples, tuple(state.blocks), ahead=self.samples)

    @property
    def stop(self) -> int:
        """The position behind its last token."""
        return self.start + self.num_tokens

    @property
    def num_output(self) -> int:
        """Tokens generated before the one that this entry draws."""
        return self.stop - len(self.request.request.prompt)


@dataclass(frozen=True)
class Plan:
    """One step: what is computed, in batch order."""

    entries: tuple[PlanEntry, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, over all requests."""
        return sum(entry.num_tokens for entry in self.entries)


@dataclass(frozen=True)
class EntryOutput:
    """What a step gave for one PlanEntry.

    token_ids: drawn tokens (empty unless the entry samples). logprobs: one per drawn token where
    asked. prompt_logprobs: for prompt positions start + 1 .. of this chunk, where asked, less the
    request's num_prompt_logprobs that were given before. hidden_sum: the request's from now on. embedding:
    once its last token is computed, where asked. error: why this request alone must end.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    hidden_sum: HiddenSum | None = None
    embedding: bytes | None = None
    error: str | None = None


@dataclass(frozen=True)
class StepOutput:
    """One EntryOutput for each entry of the plan, in its order."""

    entries: tuple[EntryOutput, ...]


class PoolBlocks(Protocol):
    """The blocks of a pool as bytes, for the thread that steps."""

    @property
    def num_bytes(self) -> int:
        """Of a block."""

    @property
    def numerics(self) -> str:
        """All that the bits of a block depend on, beside the weights and the tokens up to its end."""

    def read(self, block: int) -> bytes:
        """A copy of a block."""

    def write(self, block: int, data: bytes | memoryview) -> None:
        """Make `data` the block."""


class Runner(Protocol):
    """What computes a plan. One is built for each engine process, and lives as long."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model and the size of its block pool."""

    @property
    def pool_blocks(self) -> PoolBlocks | None:
        """The pool's blocks, where they can be had as bytes."""

    def run(self, plan: Plan) -> StepOutput:
        """Compute one step.

        Every layer writes the keys and values of all the plan's tokens before any of its attention
        reads them: an entry may read blocks that an earlier entry of the same plan fills. A fault
        of one request is its EntryOutput.error; an exception fails the whole step.
        """

    def prepare(self) -> bool:
        """Do a part, some tenths of a second, of what makes later steps faster; False: nothing is left.

        For times when there is nothing else to do.
        """


class Started(Protocol):
    """A step that is under way."""

    def result(self) -> StepOutput:
        """Wait for what it gives. Raises what makes the whole step fail."""


@runtime_checkable
class AheadRunner(Runner, Protocol):
    """A runner whose steps compute by themselves once they are started, one after another."""

    def start(self, plan: Plan, before: Started | None = None) -> Started:
        """Start a step. before: the one whose tokens the plan's entries ahead go on from.

        See `run`; a fault may also show in the result.
        """
