"""Whole answers, as the fold of their deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quantd.daemon.content_end import Finish
from quantd.daemon.deltas import Delta, ScoredToken
from quantd.daemon.generation import Generation
from quantd.daemon.output_parser import ToolCallDelta


@dataclass
class ToolCall:
    """A whole call. arguments: a JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass
class Answer:
    """One whole choice."""

    index: int
    text: str = ""
    tokens: list[ScoredToken] = field(default_factory=list)
    finish_reason: Finish | None = None
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    stop_string: str | None = None
    token_ids: list[int] = field(default_factory=list)


async def collect(generation: Generation) -> list[Answer]:
    """The whole answer, as the fold of its deltas."""
    parts: list[list[Delta]] = [[] for _ in range(generation.num_choices)]
    async for delta in generation:
        parts[delta.index].append(delta)
    return [_fold(index, deltas) for index, deltas in enumerate(parts)]


def _fold(index: int, deltas: Sequence[Delta]) -> Answer:
    return Answer(
        index,
        text="".join(delta.text for delta in deltas),
        tokens=[token for delta in deltas for token in delta.tokens],
        finish_reason=deltas[-1].finish_reason,
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=_fold_calls([delta.tool_call for delta in deltas if delta.tool_call is not None]),
        stop_string=deltas[-1].stop_string,
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
    )


def _fold_calls(parts: Sequence[ToolCallDelta]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for part in parts:
        if part.index == len(calls):
            calls.append(ToolCall(part.id or "", part.name or ""))
        calls[part.index].arguments += part.arguments
    return calls
