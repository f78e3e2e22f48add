"""What is asked of an engine and how it answers: parameters, Request, TokenEvent (torch-free)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from quantd.engine.errors import RequestError

FinishReason = Literal["stop", "complete", "length", "abort", "error"]
"""stop: at a stop token, the last of its tokens; complete: nothing can follow by the request's grammar."""

Pooling = Literal["mean", "last", "first"]
MAX_LOGPROBS = 20
MAX_GRAMMAR_LEN = 1 << 19
"""Characters of a grammar; the schemas of a hundred tools are shorter."""

INT64_MAX = 2**63 - 1
MAX_TOKENS = 2**31 - 1
_MOST_BEFORE_THINKING = 4
_OTHER_TOKEN = -1  # than those that begin and end reasoning


class ThinkingBudget(msgspec.Struct, frozen=True):
    """How many tokens a continuation may reason, and the token that then ends the reasoning.

    opening: the token that begins it; None: the prompt ends in it.
    """

    num_tokens: int
    closing: int
    opening: int | None = None

    def forced(self, output: Sequence[int]) -> int | None:
        """The only token that may come after this output, if its reasoning has to end now."""
        if len(output) < self.num_tokens or self.closing in output:
            return None
        begin = 0
        if self.opening is not None:
            # White space may go before it, and nothing else.
            if self.opening not in output[:_MOST_BEFORE_THINKING]:
                return None
            begin = output.index(self.opening) + 1
        return self.closing if len(output) - begin >= self.num_tokens else None

    def may_force(self, output: Sequence[int]) -> bool:
        """Whether after this output and one more token, which nobody knows yet, only one may come."""
        kinds = {_OTHER_TOKEN, _OTHER_TOKEN if self.opening is None else self.opening}
        return any(self.forced([*output, token_id]) is not None for token_id in kinds)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one continuation is drawn. Text-level matters (stop strings, n, echo) are the daemon's.

    temperature 0 is greedy. top_k 0 or -1: off. min_tokens: stop ids are masked until then.
    stop_token_ids: the model's end ids (unless ignored) and the client's. grammar: what the continuation
    must be (see quantd.engine.grammar); stop ids come where it is complete and nowhere else, and where
    nothing else can follow the continuation ends without one, before min_tokens too. max_tokens None: to
    the context's end. logprobs None: off; N: the chosen token's and the N likeliest of each step.
    prompt_logprobs likewise for every prompt token but the first. Logprobs are those of the raw logits,
    before penalties, temperature and grammar.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    grammar: str | None = None
    thinking: ThinkingBudget | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def penalizes(self) -> bool:
        """Whether tokens that were there before are less, or more, likely."""
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1, 0, 0)

    def validate(self, vocab_size: int) -> None:
        """Raise RequestError naming the first field that no engine could honour."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name} must be between {low} and {high}, got {value}", name)
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in ids:
                if not 0 <= token_id < vocab_size:
                    raise RequestError(f"{name}: token id {token_id} is not in 0..{vocab_size - 1}", name)
        if any(not -100 <= bias <= 100 for bias in self.logit_bias.values()):
            raise RequestError("logit_bias values must be between -100 and 100", "logit_bias")
        if self.grammar is not None:
            self._check_grammar(self.grammar)

    def _check_grammar(self, grammar: str) -> None:
        if len(grammar) > MAX_GRAMMAR_LEN:
            raise RequestError(
                f"the grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_LEN} are taken", "grammar"
            )
        if not self.stop_token_ids:
            raise RequestError(
                "a grammar needs stop_token_ids, the tokens that may follow a complete answer: the model "
                "names no end of its own",
                "grammar",
            )


# NaN fails every comparison, so the range test refuses it too.
_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_k", -1, INT64_MAX),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-3, 100.0),
    ("frequency_penalty", -2.0, 2.0),
    ("presence_penalty", -2.0, 2.0),
    ("seed", -INT64_MAX - 1, INT64_MAX),
    ("max_tokens", 0, MAX_TOKENS),
    ("min_tokens", 0, MAX_TOKENS),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)


class EmbeddingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How hidden states behind the final norm become one vector.

    pooling: their mean over all tokens, or that of the last or the first one. dimensions: how many of its
    elements, from the first on; None for all. normalize: whether it then gets length 1.
    """

    pooling: Pooling = "mean"
    dimensions: int | None = None
    normalize: bool = True

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether tokens found in the prefix cache, which have no hidden states, would be missed."""
        return self.pooling != "last"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, and one continuation of it or, with max_tokens 0, its embedding.

    salt: requests share cached blocks only within a salt. lasting: later requests may have this salt, also
    when this engine is gone. reports_progress: each step on the prompt is to be told of. urgent: it is short,
    and somebody waits for it while typing.
    """

    id: str
    prompt: list[int]
    sampling: SamplingParams
    salt: str = ""
    lasting: bool = True
    embedding: EmbeddingParams | None = None
    reports_progress: bool = False
    urgent: bool = False

    @property
    def comes_back(self) -> bool:
        """Whether later prompts may well begin like this one, so that its blocks are worth a disk."""
        return self.lasting and self.embedding is None

    @property
    def draws(self) -> bool:
        """Whether any token is wanted."""
        return self.sampling.max_tokens != 0


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """A token's log probability and the likeliest (id, logprob) at its position, best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step did for one request.

    token_ids: new tokens, a stop id included. logprobs: one per new token where asked.
    prompt_logprobs: entries for the next prompt positions, in order from position 1, as chunks are
    computed. embedding: where asked, little-endian float32. num_cached: prompt tokens taken from
    the prefix cache, in the first event only; so is admitted, when the request's first step was planned, of
    time.monotonic. num_computed: where asked, prompt tokens that are computed or
    were cached, in each event up to the first token's; so is num_cached there. finish_reason ends the
    request; `error` says why where it is "error".
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []
    embedding: bytes | None = None
    num_cached: int | None = None
    admitted: float | None = None
    num_computed: int | None = None
    finish_reason: FinishReason | None = None
    error: str | None = None
