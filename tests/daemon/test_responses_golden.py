"""The shapes of Responses: golden files, and streams as the SDK's types and Codex' rules read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from answers import DELTAS, answers
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from quantd.daemon.deltas import Delta, Head, Usage
from quantd.daemon.errors import GenerationError, OverloadedError
from quantd.daemon.sections import Sections
from quantd.daemon.wire.responses import Reply
from quantd.daemon.wire.responses_request import ResponsesBody
from quantd.daemon.wire.responses_stream import ResponseStream
from quantd.engine.errors import ContextLengthError, RequestError

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
HEAD = Head("1", "tiny", 1, 7)
USAGE = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4, reasoning_tokens=2)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RAW, SUMMARY = None, {"summary": "auto"}


def reply_for(reasoning: dict[str, str] | None) -> Reply:
    body = msgspec.convert({"model": "tiny", "input": "hi", "reasoning": reasoning}, ResponsesBody)
    reply = Reply(body)
    reply.started(HEAD)
    return reply


def frames_of(reply: Reply, deltas: Sequence[Delta], pings: bool = False) -> list[bytes]:
    stream = ResponseStream(reply, lambda response: None)
    ping = [lambda: stream.ping("")] if pings else []
    frames = [*(tell() for tell in ping), *stream.start(HEAD)]
    for delta in deltas:
        frames += [*stream.delta(delta), *(tell() for tell in ping)]
    return [*frames, *stream.finish(USAGE)]


def whole(reply: Reply, deltas: Sequence[Delta]) -> dict[str, Any]:
    sections = Sections()
    for delta in deltas:
        sections.feed(delta)
    return reply.finished(sections, USAGE)


def events_of(frames: Sequence[bytes]) -> list[Any]:
    """The events; checks that each is named by its type and numbered in order."""
    events = []
    for frame in b"".join(frames).decode().removesuffix("\n\n").split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == len(events)
        events.append(event)
    return events


def without_names(reply: Reply, value: Any) -> Any:
    """With the same ids and times in every run."""
    text = json.dumps(value).replace(reply.key, "KEY")
    times = {"created_at", "completed_at"}
    return json.loads(text, object_hook=lambda item: {k: 0 if k in times else item[k] for k in item})


@pytest.mark.parametrize("name", ["reply", "stream", "summary_stream"])
def test_shapes(name: str) -> None:
    reply = reply_for(SUMMARY if name == "summary_stream" else RAW)
    made = whole(reply, DELTAS) if name == "reply" else events_of(frames_of(reply, DELTAS))
    assert without_names(reply, made) == json.loads((GOLDEN / f"responses_{name}.json").read_text())


@pytest.fixture(scope="module")
def replayed() -> Iterator[Callable[[Sequence[bytes]], Response]]:
    """The last response that the SDK's accumulator sees in a stream."""
    streams: list[bytes] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        headers = {"content-type": "text/event-stream"}
        return httpx2.Response(200, headers=headers, content=streams.pop())

    http_client = openai.DefaultHttpxClient(transport=httpx2.MockTransport(answer))
    with openai.OpenAI(api_key="any", http_client=http_client) as client:

        def replay(frames: Sequence[bytes]) -> Response:
            streams.append(b"".join(frames))
            with client.responses.stream(model="tiny", input="hi") as stream:
                *_, last = stream
            return last.response

        yield replay


@settings(deadline=None)
@given(deltas=answers(), reasoning=st.sampled_from([RAW, SUMMARY]), pings=st.booleans())
def test_a_stream_adds_up_to_the_whole_reply(
    replayed: Callable[[Sequence[bytes]], Response],
    deltas: list[Delta],
    reasoning: dict[str, str] | None,
    pings: bool,
) -> None:
    reply = reply_for(reasoning)
    frames = frames_of(reply, deltas, pings)
    expected = without_names(reply, whole(reply, deltas))
    events = without_names(reply, events_of(frames))
    events = [event for event in events if event["type"] != "response.in_progress"]
    for event in events:
        EVENT.validate_python(event)
    Response.model_validate(expected)
    assert events[0]["type"] == "response.created"
    assert (events[-1]["type"], events[-1]["response"]) == (f"response.{expected['status']}", expected)
    assert len(replayed(frames).output) == len(expected["output"])
    check_items(events[1:-1], expected["output"])


def check_items(events: list[Any], output: list[Any]) -> None:
    """Each item has its events in a row, and its deltas join to what it says in the end."""
    for index, item in enumerate(output):
        assert events[0]["type"] == "response.output_item.added" and events[0]["output_index"] == index
        assert events[0]["item"]["id"] == item["id"] and events[0]["item"]["status"] == "in_progress"
        end = next(i for i, event in enumerate(events) if event["type"] == "response.output_item.done")
        within, done, events = events[1:end], events[end], events[end + 1 :]
        assert done["item"] == item
        assert all((e["item_id"], e["output_index"]) == (item["id"], index) for e in within)
        parts = [event["delta"] for event in within if event["type"].endswith(".delta")]
        assert "".join(parts) == said_in(item)
    assert not events


def said_in(item: Any) -> str:
    if item["type"] == "function_call":
        return item["arguments"]
    (part,) = item["content"] or item["summary"]
    return part["text"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ContextLengthError(9, 8, "9 tokens do not fit 8"), "context_length_exceeded"),
        (OverloadedError("try again later"), "rate_limit_exceeded"),
        (RequestError("no"), "invalid_prompt"),
        (GenerationError("layer 3 gave NaN"), "server_error"),
    ],
)
@pytest.mark.parametrize("num_deltas", [None, 0, 6])
def test_a_failure_is_the_last_event(error: Exception, code: str, num_deltas: int | None) -> None:
    reply, kept = reply_for(RAW), []
    stream = ResponseStream(reply, kept.append)
    frames = [] if num_deltas is None else list(stream.start(HEAD))
    for delta in DELTAS[:num_deltas] if num_deltas else ():
        frames += stream.delta(delta)
    events = events_of([*frames, *stream.error(error)])
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = events[-1]["response"]
    assert events[-1]["type"] == "response.failed" and last["status"] == "failed" and kept == [last]
    assert last["error"] == {"code": code, "message": str(error)}
    assert [item["status"] for item in last["output"]] == (
        ["completed"] * 2 + ["incomplete"] if num_deltas else []
    )
