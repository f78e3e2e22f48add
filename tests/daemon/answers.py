"""Answers made up of deltas, as parsers give them, for the tests of dialects that tell them in parts."""

from __future__ import annotations

import json

from hypothesis import strategies as st

from quantd.daemon.deltas import Delta
from quantd.daemon.output_parser import ToolCallDelta

DELTAS = (
    Delta(0, reasoning="Let me "),
    Delta(0, reasoning="look."),
    Delta(0, "I look"),
    Delta(0, " it up."),
    Delta(0, tool_call=ToolCallDelta(0, "call_a", "read_gauge")),
    Delta(0, tool_call=ToolCallDelta(0, arguments='{"n"')),
    Delta(0, tool_call=ToolCallDelta(0, arguments=": 4}")),
    Delta(0, tool_call=ToolCallDelta(1, "call_b", "stop", "{}"), finish_reason="tool_calls"),
)

_ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2)


@st.composite
def answers(draw: st.DrawFn) -> list[Delta]:
    """Text and reasoning in any order, and calls in parts, one after another."""
    deltas, calls = [], 0
    for kind in draw(st.lists(st.sampled_from(["text", "reasoning", "call"]), max_size=8)):
        if kind != "call":
            deltas.append(Delta(0, **{kind: draw(st.text(min_size=1, max_size=4))}))
            continue
        arguments = json.dumps(draw(_ARGUMENTS))
        cut = draw(st.integers(0, len(arguments)))
        deltas.append(Delta(0, tool_call=ToolCallDelta(calls, f"call_{calls}", "f", arguments[:cut])))
        deltas.append(Delta(0, tool_call=ToolCallDelta(calls, arguments=arguments[cut:])))
        calls += 1
    stop_string = draw(st.none() | st.just("END"))
    reason = "stop" if stop_string else draw(st.sampled_from(["stop", "length", "tool_calls"]))
    return [*deltas, Delta(0, finish_reason=reason, stop_string=stop_string)]
