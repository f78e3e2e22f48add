"""Anthropic's shapes: golden files, and streams as the official SDK's own accumulator reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import anthropic as sdk
import httpx2
import pytest
from answers import DELTAS, answers
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from quantd.daemon.deltas import Delta, Head, Usage
from quantd.daemon.output_parser import ToolCallDelta
from quantd.daemon.sections import Sections
from quantd.daemon.wire import anthropic
from quantd.daemon.wire.errors import Fault, fault_of
from quantd.engine.errors import ContextLengthError

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
HEAD = Head("1", "tiny", 1, 7)
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
EVENT: TypeAdapter[Any] = TypeAdapter(sdk.types.RawMessageStreamEvent)


def frames_of(deltas: Sequence[Delta], caches: bool = True) -> list[bytes]:
    stream = anthropic.MessageStream(caches)
    frames = [stream.ping(""), *stream.start(HEAD), stream.ping("")]
    for delta in deltas:
        frames += [*stream.delta(delta), stream.ping("")]
    return [*frames, *stream.finish(USAGE)]


def whole(deltas: Sequence[Delta], caches: bool = True) -> dict[str, Any]:
    sections = Sections()
    for delta in deltas:
        sections.feed(delta)
    return anthropic.message_object(HEAD, sections, USAGE, caches)


def events_of(frames: Sequence[bytes]) -> list[Any]:
    """The events without pings; checks that each is named by its type."""
    events = []
    for frame in frames:
        name, data = frame.decode().removesuffix("\n\n").split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event != {"type": "ping"}:
            events.append(event)
    return events


@pytest.fixture(scope="module")
def replayed() -> Iterator[Callable[[Sequence[bytes]], sdk.types.Message]]:
    """What the SDK makes of a stream."""
    streams: list[bytes] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=headers, content=streams.pop())

    transport = httpx2.MockTransport(answer)
    body: Any = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
    with sdk.Anthropic(api_key="any", http_client=sdk.DefaultHttpxClient(transport=transport)) as client:

        def replay(frames: Sequence[bytes]) -> sdk.types.Message:
            streams.append(b"".join(frames))
            with client.messages.stream(**body) as stream:
                return stream.get_final_message()

        yield replay


@pytest.mark.parametrize(
    ("name", "made"), [("stream", events_of(frames_of(DELTAS))), ("reply", whole(DELTAS))]
)
def test_shapes(name: str, made: Any) -> None:
    assert made == json.loads((GOLDEN / f"anthropic_{name}.json").read_text())


@settings(deadline=None)
@given(deltas=answers(), caches=st.booleans())
def test_a_stream_adds_up_to_the_whole_reply(
    replayed: Callable[[Sequence[bytes]], sdk.types.Message], deltas: list[Delta], caches: bool
) -> None:
    frames = frames_of(deltas, caches)
    expected = sdk.types.Message.model_validate(whole(deltas, caches)).to_dict(exclude_none=True)
    assert replayed(frames).to_dict(exclude_none=True) == expected
    for event in events_of(frames):
        EVENT.validate_python(event)
    opened: int | None = None
    count = 0
    for event in events_of(frames)[1:-2]:
        kind = event["type"].removeprefix("content_block_")
        assert (opened is None) == (kind == "start") and event["index"] == (opened or count)
        opened = None if kind == "stop" else event["index"]
        count += kind == "stop"
    assert opened is None and count == len(expected["content"])


def test_cached_tokens_are_told_to_who_asked_for_caching() -> None:
    assert whole(DELTAS)["usage"] == {
        "input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }
    unasked = whole(DELTAS, caches=False)["usage"]
    assert (unasked["input_tokens"], unasked["cache_read_input_tokens"]) == (7, 0)


def test_arguments_that_were_cut_make_no_input() -> None:
    call = Delta(0, tool_call=ToolCallDelta(0, "call_a", "f", '{"n": '), finish_reason="length")
    reply = whole([call])
    assert reply["content"][0]["input"] == {} and reply["stop_reason"] == "max_tokens"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (403, "permission_error"),
        (404, "not_found_error"),
        (405, "invalid_request_error"),
        (413, "request_too_large"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ],
)
def test_kinds_of_errors(status: int, kind: str) -> None:
    body = anthropic.error_object(Fault(status, "no", request_id="req_1"))
    assert body == {"type": "error", "error": {"type": kind, "message": "no"}, "request_id": "req_1"}


def test_a_prompt_that_is_too_long_is_told_as_claude_code_reads_it() -> None:
    """It looks for these words, and compacts by the difference of the numbers."""
    error = ContextLengthError(512, 512, "512 tokens do not fit 512")
    message = anthropic.error_object(fault_of(error))["error"]["message"]
    assert message.startswith("prompt is too long: 512 tokens > 511 maximum")
    (event,) = events_of(anthropic.MessageStream(False).error(error))
    details = {"error_code": "context_length_exceeded"}
    assert event["error"] == {"type": "invalid_request_error", "message": message, "details": details}
