"""OpenAI's shapes, field by field, against golden files; and what must not be served as a stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quantd.daemon.answers import Answer
from quantd.daemon.deltas import Delta, Head, ScoredToken, Usage
from quantd.daemon.wire import openai
from quantd.engine.errors import ContextLengthError

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
HEAD = Head("1", "tiny", 2, 7)
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
TOKENS = (
    ScoredToken(b"Hi", True, -0.25, ((b"Hi", -0.25), (b"\xf0\x9f", -2.0)), 0),
    ScoredToken(b"\xf0\x9f", True, -1.0, (), 2),
    ScoredToken(b"<s>", False, float("-inf"), (), 2),
)
ANSWER = Answer(0, "Hi\ufffd", list(TOKENS), "length")
DELTAS = (Delta(0, "Hi", TOKENS[:1]), Delta(1, "", (), "stop"), Delta(0, "\ufffd", TOKENS[1:], "length"))


def events_of(stream: openai.ChatStream | openai.CompletionStream) -> list[Any]:
    frames = [*stream.start(HEAD), *(frame for delta in DELTAS for frame in stream.delta(delta))]
    frames += stream.finish(USAGE)
    assert frames.pop() == b"data: [DONE]\n\n"
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames]


def without_times(value: Any) -> Any:
    if isinstance(value, list):
        return [without_times(item) for item in value]
    assert isinstance(value.pop("created"), int)
    return value


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("chat_stream", events_of(openai.ChatStream(True, True))),
        ("completion_stream", events_of(openai.CompletionStream(True, False))),
        ("chat_reply", openai.chat_reply(HEAD, [ANSWER], True, USAGE)),
        ("completion_reply", openai.completion_reply(HEAD, [ANSWER], True, USAGE)),
    ],
)
def test_shapes(name: str, made: Any) -> None:
    golden = json.loads((GOLDEN / f"openai_{name}.json").read_text())
    assert without_times(made) == golden


def test_an_error_frame_is_a_data_frame() -> None:
    error = ContextLengthError(9, 8, "9 tokens do not fit 8")
    (frame,) = openai.ChatStream(False, False).error(error)
    assert json.loads(frame.removeprefix(b"data: ").removesuffix(b"\n\n")) == {
        "error": {
            "message": "9 tokens do not fit 8",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
            "n_prompt_tokens": 9,
            "n_ctx": 8,
        }
    }
