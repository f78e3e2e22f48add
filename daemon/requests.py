"""What can be asked of the daemon, in no dialect. `wire/` parses each dialect into these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quantd.daemon.constraints import Constraint
from quantd.daemon.infill import InfillText
from quantd.daemon.line_rules import LineRules
from quantd.daemon.model_files import USUAL_SAMPLING
from quantd.daemon.templates import Message
from quantd.engine.request import SamplingParams


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to answer. sampling: its stop_token_ids are the client's own; the model's are added here.

    open: fields of sampling that the client left open, for which the model has defaults of its own.
    n: choices for each prompt; a seeded request gives choice j the seed plus j. cache_salt: prompts share
    cached prefixes only under the same salt. lasting: later requests may have this salt. constraint: what
    the answer must be. context_len: tokens, prompt and answer, that this request may have at most, if fewer
    than the model's. usual: sampling for open fields of models whose authors say nothing of it. keep_alive:
    seconds that the model is to stay in memory afterwards, see KeepAlive. biased_texts: logit biases of all
    tokens of a text. lines: how lines may end the answer. reports_progress: deltas are to tell how far the
    prompt is computed.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    open: frozenset[str] = frozenset()
    usual: Mapping[str, float] = field(default_factory=lambda: USUAL_SAMPLING)
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    lasting: bool = True
    constraint: Constraint | None = None
    context_len: int | None = None
    keep_alive: float | None = None
    biased_texts: Mapping[str, float] = field(default_factory=dict)
    lines: LineRules = field(default_factory=LineRules)
    reports_progress: bool = False


@dataclass(frozen=True)
class ToolChoice:
    """Whether the answer may or must call tools. name: the only one to call; allowed: those that may be."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A conversation to go on with. model None or "default": the one at hand.

    messages, tools: as templates read them, which is OpenAI's form with arguments of calls as objects.
    parallel_tool_calls: whether an answer may call more than once. thinking: whether the model is to
    reason first; None: as it does by itself. thinking_tokens: how many it may reason for. template: Jinja to
    use in place of the model's own. history: tokens that the conversation goes on from. continues: the last
    message is the assistant's, and the answer goes on with it. truncate: leave out the oldest turns where
    all do not fit.
    """

    model: str | None
    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    thinking: bool | None = None
    thinking_tokens: int | None = None
    documents: Sequence[dict[str, Any]] | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    history: Sequence[int] = ()
    continues: bool = False
    truncate: bool = False
    options: Options = Options()


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """Raw prompts to go on with. echo: repeat each prompt before its answer.

    prompts: texts, token ids, or pieces of both that follow each other.
    """

    model: str | None
    prompts: Sequence[str | Sequence[int | str]]
    echo: bool = False
    options: Options = Options()


@dataclass(frozen=True, kw_only=True)
class InfillRequest:
    """A gap between two texts to fill. An empty suffix is one too: the gap is at the end of a file.

    trims_files: where all do not fit, leave out the oldest files, which the client counts on; the text
    around the cursor is never cut.
    """

    model: str | None
    text: InfillText
    trims_files: bool = False
    options: Options = Options()
