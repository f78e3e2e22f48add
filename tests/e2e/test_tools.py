"""Tool calls and structured answers of a small real model through the daemon: cases c01, c27 and c29."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import jsonschema
import pytest
from test_daemon import CHAT, Served, case, serve

from quantd.daemon.store import Store

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 20},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    Store(home / "models").import_path(smollm2, "smollm2")
    with serve(home, "smollm2", "--kv-memory", "64MiB") as daemon:
        yield daemon


def streamed(served: Served, body: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The deltas of a stream with one choice, and why it finished."""
    with served.http() as http:
        text = http.post(CHAT, json=body | {"stream": True}).text
    *frames, done, end = text.split("\n\n")
    assert done == "data: [DONE]" and not end
    choices = [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in frames if frame[0] != ":"]
    (reason,) = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return [choice["delta"] for choice in choices], reason


def calls_of(deltas: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Names and joined arguments; checks what each delta may hold."""
    calls: list[tuple[str, str]] = []
    ids = set()
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if call["index"] == len(calls):
            assert call.keys() == {"index", "id", "type", "function"} and call["type"] == "function"
            assert call["function"]["arguments"] == ""
            calls.append((call["function"]["name"], ""))
            ids.add(call["id"])
        else:
            assert call.keys() == {"index", "function"} and call["function"].keys() == {"arguments"}
            name, arguments = calls[call["index"]]
            calls[call["index"]] = (name, arguments + call["function"]["arguments"])
    assert len(ids) == len(calls)
    return calls


@pytest.mark.parametrize("name", ["c29", "c29b"])
def test_forced_calls(served: Served, name: str) -> None:
    body = case(name)
    deltas, reason = streamed(served, body)
    ((called, arguments),) = calls_of(deltas)
    expected = {"c29": {}, "c29b": {"level": 42, "opts": {"hold": True}}}[name]
    assert json.loads(arguments) == expected and reason == "tool_calls"
    assert not any(delta.get("content") for delta in deltas)
    status, reply = served.post(CHAT, body | {"stream": False})
    assert status == 200
    (choice,) = reply["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": called, "arguments": arguments}
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None


def test_a_named_function(served: Served) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    body = {"messages": QUESTION, "tools": [other, WEATHER], "tool_choice": choice, "temperature": 0}
    deltas, reason = streamed(served, body)
    ((name, arguments),) = calls_of(deltas)
    assert (name, reason) == ("get_weather", "stop")
    assert json.loads(arguments).keys() == {"city", "unit"}
    status, reply = served.post(CHAT, body)
    assert status == 200 and reply["choices"][0]["finish_reason"] == "stop"


def test_several_answers_each_with_a_call(served: Served) -> None:
    body = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": "required", "n": 3, "seed": 1}
    status, reply = served.post(CHAT, body)
    assert status == 200
    calls = [choice["message"]["tool_calls"][0] for choice in reply["choices"]]
    assert len({call["id"] for call in calls}) == 3
    for call in calls:
        assert json.loads(call["function"]["arguments"])["unit"] in ("celsius", "fahrenheit")


def test_free_to_call_or_not(served: Served) -> None:
    body = {"messages": QUESTION, "tools": [WEATHER], "temperature": 0, "max_tokens": 60}
    for choice in ("auto", "none"):
        status, reply = served.post(CHAT, body | {"tool_choice": choice})
        assert status == 200
        message = reply["choices"][0]["message"]
        assert message["content"] or (choice == "auto" and message["tool_calls"])


CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
NAMED = {"type": "json_schema", "name": "city", "schema": CITY}


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        (
            CHAT,
            {"messages": QUESTION, "response_format": {"type": "json_schema", "json_schema": NAMED}},
            ("choices", 0, "message", "content"),
        ),
        ("/v1/completions", {"prompt": "The city: ", "guided_json": CITY}, ("choices", 0, "text")),
        (
            "/v1/messages",
            {"messages": QUESTION, "output_config": {"format": {"type": "json_schema", "schema": CITY}}},
            ("content", 0, "text"),
        ),
        (
            "/v1/responses",
            {"input": "hi", "text": {"format": NAMED}},
            ("output", 0, "content", 0, "text"),
        ),
        ("/api/chat", {"messages": QUESTION, "format": CITY, "stream": False}, ("message", "content")),
        ("/api/generate", {"prompt": "A city", "format": CITY, "stream": False}, ("response",)),
        ("/completion", {"prompt": "The city: ", "json_schema": CITY, "n_predict": 60}, ("content",)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_surface_keeps_to_a_schema(
    served: Served, path: str, body: dict[str, Any], place: tuple[str | int, ...]
) -> None:
    status, answer = served.post(path, {"model": "smollm2", "max_tokens": 60} | body)
    assert status == 200, answer
    for key in place:
        answer = answer[key]
    value = json.loads(answer)
    assert value.keys() == {"city"} and len(value["city"]) <= 20


def completed(served: Served, fields: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The choice, and how many tokens it has."""
    body = {"prompt": "It is ", "max_tokens": 40, "temperature": 0} | fields
    status, answer = served.post("/v1/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    return choice, answer["usage"]["completion_tokens"]


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["red", "dark blue"]}, "red|dark blue"),
        ({"guided_regex": "[0-9]{3}/[a-z]{2}"}, "[0-9]{3}/[a-z]{2}"),
        ({"grammar": 'root ::= "a" [bc] [bc]? "d"'}, "a[bc][bc]?d"),
        ({"structured_outputs": {"grammar": "start: /x{3}/"}}, "xxx"),
    ],
    ids=str,
)
def test_other_forms(served: Served, fields: dict[str, Any], pattern: str) -> None:
    choice, num_tokens = completed(served, fields)
    assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"]), choice
    just_enough, _ = completed(served, fields | {"max_tokens": num_tokens})
    assert just_enough == choice


def test_case_c27(served: Served) -> None:
    body = case("c27")
    status, answer = served.post(CHAT, body | {"model": "smollm2", "max_tokens": 300})
    assert status == 200, answer
    schema = body["response_format"]["json_schema"]["schema"]
    choice = answer["choices"][0]
    if choice["finish_reason"] == "stop":
        jsonschema.validate(json.loads(choice["message"]["content"]), schema)


def test_forced_calls_by_the_other_surfaces(served: Served) -> None:
    """As the SDKs of Anthropic and of OpenAI's Responses ask for them."""
    function = WEATHER["function"]
    described = {"name": function["name"], "description": function["description"]}
    schema = function["parameters"]
    with anthropic.Anthropic(base_url="http://x", api_key="x", http_client=served.http()) as client:
        message = client.messages.create(
            model="smollm2",
            max_tokens=100,
            messages=QUESTION,
            tools=[described | {"input_schema": schema}],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
    (block,) = message.content
    assert (block.type, block.name, message.stop_reason) == ("tool_use", function["name"], "tool_use")
    jsonschema.validate(block.input, schema)
    with served.client() as client:
        response = client.responses.create(
            model="smollm2",
            input=QUESTION,
            tools=[described | {"type": "function", "parameters": schema, "strict": True}],
            tool_choice={"type": "function", "name": function["name"]},
        )
    (item,) = response.output
    assert (item.type, item.name, response.status) == ("function_call", function["name"], "completed")
    jsonschema.validate(json.loads(item.arguments), schema)


def content_of(deltas: list[dict[str, Any]]) -> str:
    return "".join(delta.get("content") or "" for delta in deltas)


def test_one_permitted_answer_in_many_scripts(served: Served) -> None:
    body = case("c01")
    deltas, reason = streamed(served, body)
    text = content_of(deltas)
    literal = body["response_format"]["json_schema"]["schema"]["properties"]["answer"]["enum"][0]
    assert json.loads(text) == {"answer": literal} and reason == "stop"
    assert not any("\ufffd" in (delta.get("content") or "") for delta in deltas)
    _, reply = served.post(CHAT, body | {"stream": False})
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == text
    data = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert data.decode() == text


def test_a_form_that_is_cut_inside_characters(served: Served) -> None:
    body = case("c01b")
    _, whole = served.post(CHAT, body | {"stream": False, "max_tokens": 200})
    answer = whole["choices"][0]["message"]["content"]
    for limit in range(1, 31):
        deltas, reason = streamed(served, body | {"max_tokens": limit})
        _, reply = served.post(CHAT, body | {"stream": False, "max_tokens": limit})
        (choice,) = reply["choices"]
        text = choice["message"]["content"]
        assert content_of(deltas) == text and reason == choice["finish_reason"]
        assert answer.startswith(text.removesuffix("\ufffd"))
        assert reason == "length" or text == answer
        assert not any("\ufffd" in (delta.get("content") or "") for delta in deltas[:-2])
