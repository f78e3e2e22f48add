"""Ollama's lines for reasoning and tools, of made-up deltas, and its messages as templates read them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from quantd.daemon.answers import Answer, ToolCall
from quantd.daemon.deltas import Delta, Head, Usage
from quantd.daemon.output_parser import ToolCallDelta
from quantd.daemon.wire import ollama
from quantd.daemon.wire.ollama_messages import MessageBody, neutral_messages

USAGE = Usage(7, 3, 4, load_seconds=0.5, prompt_seconds=0.25, decode_seconds=1.0)
HEAD = Head("id", "tiny", 1, 7, prompt=[1, 2])
CALL = {"id": "a", "function": {"index": 0, "name": "f", "arguments": {"x": [1, {"y": None}]}}}
OTHER = {"id": "b", "function": {"index": 1, "name": "g", "arguments": {}}}


def call(index: int, arguments: str, id: str | None = None, name: str | None = None) -> Delta:
    return Delta(0, tool_call=ToolCallDelta(index, id, name, arguments))


def end(reason: Any = "tool_calls") -> Delta:
    return Delta(0, finish_reason=reason)


FIRST = [call(0, "", "a", "f"), call(0, '{"x": [1, '), call(0, '{"y": null}]}')]
SECOND = [call(1, "", "b", "g")]


def streamed(*deltas: Delta, piece: ollama.Piece = ollama.chat_piece) -> list[dict[str, Any]]:
    stream = ollama.AnswerStream(ollama.Telling(piece, "tiny"))
    frames = [*stream.start(HEAD)]
    frames += [frame for delta in deltas for frame in stream.delta(delta)]
    frames += stream.finish(USAGE)
    assert all(frame.endswith(b"\n") and frame.count(b"\n") == 1 for frame in frames)
    return [json.loads(frame) for frame in frames]


def messages(*deltas: Delta) -> list[dict[str, Any]]:
    """What the lines of a chat say, without the role."""
    said = [line["message"] for line in streamed(*deltas)]
    assert all(message.pop("role") == "assistant" for message in said)
    return said


def test_reasoning_goes_before_content_in_a_field_of_its_own() -> None:
    said = messages(Delta(0, reasoning="Hm"), Delta(0, reasoning="m."), Delta(0, "Yes."), end("stop"))
    assert said == [
        {"content": "", "thinking": "Hm"},
        {"content": "", "thinking": "m."},
        {"content": "Yes."},
        {"content": ""},
    ]


def test_a_call_is_an_object_in_the_last_line() -> None:
    said = messages(Delta(0, "Well."), *FIRST, end())
    assert said == [{"content": "Well."}, {"content": "", "tool_calls": [CALL]}]


def test_of_several_calls_each_has_a_line() -> None:
    said = messages(*FIRST, *SECOND, end())
    assert said == [{"content": "", "tool_calls": [CALL]}, {"content": "", "tool_calls": [OTHER]}]


def test_text_after_a_call_comes_after_it() -> None:
    said = messages(*FIRST, Delta(0, "Done."), end())
    assert said == [{"content": "", "tool_calls": [CALL]}, {"content": "Done."}, {"content": ""}]


def test_a_call_that_was_cut_is_text() -> None:
    last = streamed(call(0, "", "a", "f"), call(0, '{"x": [1'), end("length"))[-1]
    assert last["message"] == {"role": "assistant", "content": 'f({"x": [1'}
    assert last["done_reason"] == "length"


def test_calls_end_an_answer_as_a_stop_does() -> None:
    last = streamed(*FIRST, end())[-1]
    assert last["done"] and last["done_reason"] == "stop"
    assert (last["total_duration"], last["load_duration"]) == (1_750_000_000, 500_000_000)
    assert (last["prompt_eval_duration"], last["eval_duration"]) == (250_000_000, 1_000_000_000)
    assert (last["prompt_eval_count"], last["eval_count"], last["cached_prompt_tokens"]) == (7, 3, 4)


def test_the_tokens_to_go_on_from() -> None:
    telling = ollama.Telling(ollama.generate_piece, "tiny", continues=True)
    stream = ollama.AnswerStream(telling)
    stream.start(HEAD)
    stream.delta(Delta(0, "a", token_ids=(3,)))
    stream.delta(Delta(0, "b", token_ids=(4, 5), finish_reason="stop"))
    assert json.loads(stream.finish(USAGE)[0])["context"] == [1, 2, 3, 4, 5]
    answer = Answer(0, "ab", token_ids=[3, 4, 5])
    assert ollama.reply(telling, HEAD, answer, USAGE)["context"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("piece", [ollama.chat_piece, ollama.generate_piece])
def test_the_whole_answer_says_what_its_stream_says(piece: ollama.Piece) -> None:
    deltas = [Delta(0, reasoning="Hm."), Delta(0, "Well."), *FIRST, *SECOND, end()]
    calls = [ToolCall("a", "f", '{"x": [1, {"y": null}]}'), ToolCall("b", "g")]
    answer = Answer(0, "Well.", [], "tool_calls", "Hm.", calls)
    whole = ollama.reply(ollama.Telling(piece, "tiny"), HEAD, answer, USAGE)
    lines = streamed(*deltas, piece=piece)
    said = [line.get("message", line) for line in lines]
    told = whole.get("message", whole)
    key = "content" if "message" in whole else "response"
    assert told[key] == "".join(part[key] for part in said) == "Well."
    assert told["thinking"] == "".join(part.get("thinking", "") for part in said) == "Hm."
    assert told["tool_calls"] == [one for part in said for one in part.get("tool_calls", [])] == [CALL, OTHER]
    assert whole.keys() - {"thinking", "tool_calls"} == lines[-1].keys() - {"thinking", "tool_calls"}


def test_a_call_that_was_cut_is_text_of_a_whole_answer_too() -> None:
    answer = Answer(0, "Well. ", [], "length", "", [ToolCall("a", "f", '{"x')])
    whole = ollama.reply(ollama.Telling(ollama.chat_piece, "tiny"), HEAD, answer, USAGE)
    assert whole["message"] == {"role": "assistant", "content": 'Well. f({"x'}


def neutral(*bodies: dict[str, Any]) -> list[dict[str, Any]]:
    return neutral_messages(msgspec.convert(list(bodies), list[MessageBody]))


def asks(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)}


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {}}} | fields


def test_roles_and_fields() -> None:
    assert neutral(
        {"role": "developer", "content": "s"},
        {"role": "User", "content": "u", "images": []},
        {"role": "assistant", "content": "a", "thinking": "t"},
        {"role": "assistant"},
    ) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a", "reasoning_content": "t"},
        {"role": "assistant", "content": ""},
    ]


def test_arguments_are_objects_however_they_come() -> None:
    calls = [{"function": {"name": "f", "arguments": given}} for given in ({"x": 1}, '{"x": 1}', None)]
    made = neutral(asks(*calls))[0]["tool_calls"]
    assert [one["function"]["arguments"] for one in made] == [{"x": 1}, {"x": 1}, {}]
    assert len({one["id"] for one in made}) == 3


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([{}, {}, {}], ["call00000", "call00001", "call00002"]),  # as gptel: by order
        (
            [{"tool_name": "g"}, {"tool_name": "f"}, {"tool_name": "f"}],
            ["call00001", "call00000", "call00002"],
        ),
        ([{"tool_call_id": "call00002"}, {}, {}], ["call00002", "call00000", "call00001"]),
        ([{"tool_name": "h"}, {}, {}, {}], ["call00000", "call00001", "call00002", None]),
        ([{"tool_call_id": "other"}, {}], ["other", "call00000"]),
    ],
)
def test_which_call_an_answer_is_to(answers: list[dict[str, str]], expected: list[str | None]) -> None:
    results = [{"role": "tool", "content": "r"} | answer for answer in answers]
    found = neutral(asks(function("f"), function("g"), function("f")), *results)[1:]
    assert [message.get("tool_call_id") for message in found] == expected


def test_ids_that_there_are_stay_and_names_are_told() -> None:
    found = neutral(asks(function("f", id="x1")), {"role": "tool", "content": "r"})
    assert found[0]["tool_calls"][0]["id"] == "x1"
    assert found[1] == {"role": "tool", "content": "r", "tool_call_id": "x1", "name": "f"}
