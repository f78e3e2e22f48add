"""A running answer in pieces: what is known of it when it starts, each piece, and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quantd.daemon.content_end import Finish
from quantd.daemon.output_parser import ToolCallDelta


@dataclass(frozen=True)
class ScoredToken:
    """A token of the text with its log probability; None for the first of a prompt.

    data: the bytes that it adds to the text. shows: False for special tokens, which add none and have
    their name there. top: bytes and log probability of the likeliest, whose ids are top_ids. offset:
    characters before it.
    """

    data: bytes
    shows: bool
    logprob: float | None
    top: tuple[tuple[bytes, float], ...]
    offset: int
    id: int = -1
    top_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Delta:
    """The next piece of one choice: a part of its content, of its reasoning or of a tool call.

    The last one of each choice has its finish_reason, and stop_string where that ended it. token_ids: those
    drawn since the choice's last delta. num_prefilled: prompt tokens computed by now, in a delta without
    anything else, where asked.
    """

    index: int
    text: str = ""
    tokens: tuple[ScoredToken, ...] = ()
    finish_reason: Finish | None = None
    reasoning: str = ""
    tool_call: ToolCallDelta | None = None
    stop_string: str | None = None
    token_ids: tuple[int, ...] = ()
    num_prefilled: int | None = None


@dataclass(frozen=True)
class Head:
    """What is known of an answer when it starts.

    context_len: tokens, prompt and answer, that a choice may have. num_left_out: files that had no room in
    the prompt. prompt: the tokens of the first.
    """

    id: str
    model: str
    num_choices: int
    prompt_tokens: int
    context_len: int = 0
    num_left_out: int = 0
    prompt: Sequence[int] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens: each prompt counted once, all choices, what the prefix cache spared, those that reasoned.

    Seconds: until the model was loaded, from then to the first token, and from that to the last.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    load_seconds: float = 0.0
    prompt_seconds: float = 0.0
    decode_seconds: float = 0.0
    reasoning_tokens: int = 0
