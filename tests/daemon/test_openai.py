"""OpenAI's wire as it is on the wire: cases c03, c06, c08, c10, c12 and c35, and their kinds."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from typing import Any

import pytest
from daemon_in_loop import Daemon, case, in_loop, running_daemon
from waiting import until_so

from quantd.daemon.errors import GenerationError
from quantd.daemon.tokenizer import Tokenizer
from quantd.engine.errors import CapacityError
from quantd.quant.errors import UnsupportedModelError

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
THREAD = "ab 🧵 漢字 é"


def chunks_of(stream: str) -> list[Any]:
    """The JSON of all events; checks the framing and that `[DONE]` closes it."""
    frames = stream.split("\n\n")
    assert frames.pop() == ""
    assert all(
        frame.startswith("data: ") and "\n" not in frame for frame in frames if not frame.startswith(":")
    )
    events = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def texts_of(chunks: list[Any]) -> dict[int, str]:
    """The joined text of each choice."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            part = choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + part
    return texts


async def refused(daemon: Daemon, path: str, body: dict[str, Any], param: str) -> str:
    """The message of a 400 that names the field; nothing may have reached an engine."""
    seen = [len(engine.seen) for engine in daemon.engines.started]
    for stream in (False, True):
        status, answer = await daemon.post(path, body | {"stream": stream})
        assert status == 400, (body, answer)
        error = answer["error"]
        assert error["type"] == "invalid_request_error" and error["param"] == param, (body, error)
        assert param in ("prompt", "messages") or param.split("[")[0] in error["message"], error
    assert seen == [len(engine.seen) for engine in daemon.engines.started][: len(seen)]
    return error["message"]


@in_loop
async def test_usage_comes_once_and_only_if_asked() -> None:
    async with running_daemon() as daemon:
        body = case("c03")
        chunks = chunks_of(await daemon.stream(CHAT, body))
        assert [chunk["choices"] == [] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-2]["choices"][0]["finish_reason"] == "length"
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
        _, reply = await daemon.post(CHAT, body | {"stream": False})
        assert reply["usage"] == chunks[-1]["usage"]
        assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + 24
        assert reply["choices"][0]["message"]["content"] == texts_of(chunks)[0]
        for options in ({}, None, {"include_usage": False}):
            body = case("c03b") | {"stream_options": options}
            for chunk in chunks_of(await daemon.stream(CHAT, body)):
                assert chunk["choices"] and "usage" not in chunk


@in_loop
async def test_a_templates_refusal_is_a_client_error() -> None:
    template = (
        "{% if messages[0]['role']=='system' %}{{ raise_exception('no system turn in this template') }}"
        "{% endif %}{{ messages[0]['content'] }}"
    )
    async with running_daemon(template=template) as daemon:
        message = await refused(daemon, CHAT, case("c06"), "messages")
        assert "no system turn in this template" in message
        assert (await daemon.post(CHAT, HI))[0] == 200


@in_loop
async def test_null_means_default() -> None:
    async with running_daemon() as daemon:
        body = case("c08")
        plain = {name: value for name, value in body.items() if value is not None}
        status, reply = await daemon.post(CHAT, body | {"temperature": 0})
        assert status == 200 and reply["usage"]["completion_tokens"] == 8
        _, other = await daemon.post(CHAT, plain | {"temperature": 0})
        assert reply["choices"] == other["choices"]
        assert daemon.engine.seen[0].sampling == daemon.engine.seen[1].sampling

        status, reply = await daemon.post(COMPLETIONS, case("c08b"))
        assert status == 200 and reply["usage"]["completion_tokens"] == 16
        assert reply["choices"][0]["finish_reason"] == "length"
        streamed = chunks_of(await daemon.stream(COMPLETIONS, case("c08b") | {"stream": True}))
        assert texts_of(streamed)[0] == reply["choices"][0]["text"]


@in_loop
async def test_content_parts_and_unlimited_length() -> None:
    async with running_daemon() as daemon:
        status, reply = await daemon.post(CHAT, case("c08c"))
        assert status == 200 and reply["choices"][0]["message"]["content"]
        request = daemon.engine.seen[0]
        assert len(request.prompt) + reply["usage"]["completion_tokens"] == 512
        prompt = daemon.service.models.entries[0].model.tokenizer.decode(request.prompt)
        assert "Name a colour.\nOne word." in prompt
        image = {"type": "image_url", "image_url": {"url": "data:,"}}
        body = HI | {"messages": [{"role": "user", "content": [image]}]}
        message = await refused(daemon, CHAT, body, "messages[0].content")
        assert "image_url" in message


TOOL_TEMPLATE = (
    "{# <tool_call> arguments #}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}\n{% endfor %}{{ tools | tojson }}"
)


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
def test_tool_round_trips(content: dict[str, Any]) -> None:
    body = case("c08d")
    del body["messages"][1]["content"]
    body["messages"][1] |= content

    async def with_tools() -> None:
        async with running_daemon(template=TOOL_TEMPLATE) as daemon:
            assert (await daemon.post(CHAT, body))[0] == 200
            tokenizer = daemon.service.models.entries[0].model.tokenizer
            prompt = tokenizer.decode(daemon.engine.seen[0].prompt)
            assert 'assistant:read_gauge{"n": 4}tool:12.5 bar' in prompt
            assert "None" not in prompt

    async def without_tools() -> None:
        async with running_daemon() as daemon:
            assert (await daemon.post(CHAT, body))[0] == 200
            tokenizer = daemon.service.models.entries[0].model.tokenizer
            prompt = tokenizer.decode(daemon.engine.seen[0].prompt)
            assert '{"name": "read_gauge", "arguments": {"n": 4}}' in prompt
            assert "12.5 bar" in prompt and "None" not in prompt

    in_loop(with_tools)()
    in_loop(without_tools)()


@pytest.mark.parametrize("arguments", ["[" * 50000, "not JSON", "5", '{"a": ' * 900 + "1" + "}" * 900])
def test_odd_tool_arguments_are_no_fault_of_the_daemon(arguments: str) -> None:
    body = case("c08d")
    body["messages"][1]["tool_calls"][0]["function"]["arguments"] = arguments

    async def post() -> None:
        async with running_daemon(template=TOOL_TEMPLATE) as daemon:
            status, answer = await daemon.post(CHAT, body)
            assert status == 200 or (status, answer["error"]["param"]) == (400, "messages")

    in_loop(post)()


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


BAD_CHAT = [
    (case("c10"), "top_logprobs"),
    (case("c10c"), "seed"),
    ({"seed": 9223372036854775808}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"n": 100000}, "n"),
    ({"n": 0}, "n"),
    ({"n": True}, "n"),
    ({"max_tokens": 10**18}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": -2}, "max_completion_tokens"),
    ({"temperature": 1e308}, "temperature"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**70}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"logit_bias": {"514": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"stop_token_ids": [514]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 4097}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": 5}, "stop"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "usr", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": schema_format({"not": {"type": "string"}})}, "response_format"),
    ({"response_format": schema_format({"$ref": "http://elsewhere/schema"})}, "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ({"grammar": "root ::= x"}, "grammar"),
    ({"guided_regex": "["}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": []}, "functions"),
]


@in_loop
async def test_bad_values_are_named_before_any_engine_sees_them() -> None:
    async with running_daemon() as daemon:
        assert (await daemon.post(CHAT, HI))[0] == 200
        for changes, param in BAD_CHAT:
            await refused(daemon, CHAT, HI | changes, param)
        for changes, param in (
            (case("c12"), "prompt"),
            (case("c12b"), "prompt"),
            ({"prompt": [514]}, "prompt"),
            ({"prompt": [1.5]}, "prompt"),
            ({"prompt": [True]}, "prompt"),
            ({"prompt": ["a", 5]}, "prompt"),
            ({"prompt": [[5], [True]]}, "prompt"),
            ({"prompt": [5, [5]]}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[]]}, "prompt"),
            ({"prompt": None}, "prompt"),
            ({"prompt": {"a": 1}}, "prompt"),
            ({"best_of": 3}, "best_of"),
            ({"logprobs": 21}, "logprobs"),
            ({"logprobs": True}, "logprobs"),
        ):
            await refused(daemon, COMPLETIONS, {"prompt": "hi"} | changes, param)
        for extremes in (
            {"seed": 2**63 - 1, "n": 2},
            {"seed": -(2**63)},
            {"top_k": 2147483648},
            {"top_k": -1},
        ):
            assert (await daemon.post(CHAT, HI | extremes))[0] == 200
        assert (await daemon.post(COMPLETIONS, {"prompt": [513]}))[0] == 200
        assert (await daemon.post(COMPLETIONS, case("c10b")))[0] == 200


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'"x"',
        b"{",
        b'{"messages": "\\ud800"}',
        b"\xff",
        b'{"a": NaN}',
        b'{"stop":' + b"[" * 100000,
    ],
    ids=["empty", "array", "string", "cut", "surrogate", "not-utf8", "nan", "deep"],
)
def test_broken_bodies_are_client_errors(data: bytes) -> None:
    async def post() -> None:
        async with running_daemon() as daemon, daemon.session.post(f"http://x{CHAT}", data=data) as response:
            assert response.status == 400
            assert (await response.json())["error"]["type"] == "invalid_request_error"

    in_loop(post)()


@in_loop
async def test_broken_encodings_are_client_errors() -> None:
    async with running_daemon() as daemon:
        headers = {"Content-Encoding": "gzip"}
        async with daemon.session.post(f"http://x{CHAT}", data=b"{}", headers=headers) as response:
            assert response.status == 400 and "Content-Encoding" in await response.text()


@in_loop
async def test_what_can_be_got_has_a_head() -> None:
    async with running_daemon() as daemon:
        for path in ("/health", "/v1/models", "/v1/models/tiny", "/metrics", "/quantd/status"):
            async with daemon.session.head(f"http://x{path}") as response:
                assert response.status == 200 and await response.read() == b""


@in_loop
async def test_index_is_prompt_times_n_plus_choice() -> None:
    async with running_daemon() as daemon:
        body = case("c12c")
        _, reply = await daemon.post(COMPLETIONS, body)
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
        assert reply["usage"]["prompt_tokens"] == 7 and reply["usage"]["completion_tokens"] == 4
        alone = [
            (await daemon.post(COMPLETIONS, body | {"prompt": prompt, "n": 1}))[1]["choices"][0]["text"]
            for prompt in body["prompt"]
        ]
        texts = [choice["text"] for choice in reply["choices"]]
        assert texts == [alone[0], alone[0], alone[1], alone[1]]
        chunks = chunks_of(await daemon.stream(COMPLETIONS, body | {"stream": True}))
        assert texts_of(chunks) == dict(enumerate(texts))
        assert len({chunk["id"] for chunk in chunks}) == 1


@in_loop
async def test_seeds_and_ends_reach_the_engine() -> None:
    async with running_daemon() as daemon:
        await daemon.post(CHAT, HI | {"n": 2, "seed": 2**63 - 1, "stop_token_ids": [9], "cache_salt": "s"})
        first, second = daemon.engine.seen
        assert [first.sampling.seed, second.sampling.seed] == [2**63 - 1, -(2**63)]
        assert first.sampling.stop_token_ids == (2, 513, 9) and first.salt.endswith("\0s")
        await daemon.post(CHAT, HI | {"ignore_eos": True})
        assert daemon.engine.seen[-1].sampling.stop_token_ids == ()
        assert daemon.engine.seen[-1].sampling.seed is None


@in_loop
async def test_echo_starts_with_the_prompt_as_sent() -> None:
    async with running_daemon() as daemon:
        body = case("c35")
        joined = texts_of(chunks_of(await daemon.stream(COMPLETIONS, body)))[0]
        _, plain = await daemon.post(COMPLETIONS, body | {"echo": False, "stream": False})
        assert joined == "one two three" + plain["choices"][0]["text"]
        prompt = daemon.engine.seen[0].prompt
        tokenizer = daemon.service.models.entries[0].model.tokenizer
        assert joined == tokenizer.decode(prompt + (prompt * 8)[:8])
        _, scored = await daemon.post(COMPLETIONS, body | {"logprobs": 1, "stream": False})
        logprobs = scored["choices"][0]["logprobs"]
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert joined[offset:].startswith(token)
        assert "".join(logprobs["tokens"]) == joined
        _, only = await daemon.post(COMPLETIONS, body | {"max_tokens": 0, "stream": False})
        assert only["choices"][0]["text"] == "one two three"


@in_loop
async def test_log_probabilities_of_completions() -> None:
    async with running_daemon() as daemon:
        body = case("c15") | {"max_tokens": 2}
        _, reply = await daemon.post(COMPLETIONS, body)
        choice = reply["choices"][0]
        logprobs = choice["logprobs"]
        assert {len(column) for column in logprobs.values()} == {66}
        assert logprobs["token_logprobs"] == [None] + [-0.5] * 65
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["top_logprobs"][1] == {"Z": -1.5, "[": -9999.0, "W": -0.5}
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
        chunks = chunks_of(await daemon.stream(COMPLETIONS, body | {"stream": True}))
        tokens = [token for chunk in chunks for token in chunk["choices"][0]["logprobs"]["tokens"]]
        assert tokens == logprobs["tokens"]
        assert texts_of(chunks)[0] == choice["text"]


@in_loop
async def test_text_and_bytes_of_split_characters() -> None:
    async with running_daemon() as daemon:
        body = {"model": "tiny", "prompt": THREAD, "logprobs": 0, "stream": True}
        num_tokens = len((await daemon.post("/v1/completions", body | {"stream": False}))[1])
        chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "stream": True}
        tokenizer = daemon.service.models.entries[0].model.tokenizer
        ids = tokenizer.encode(THREAD)
        assert num_tokens and len(ids) > len(THREAD)
        daemon.engine.script = lambda request: [*ids, 513]
        chunks = chunks_of(await daemon.stream(CHAT, chat | {"max_tokens": 99}))
        assert texts_of(chunks)[0] == THREAD
        entries = [
            entry
            for chunk in chunks
            for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
        ]
        assert bytes(byte for entry in entries for byte in entry["bytes"]).decode() == THREAD
        for limit in range(1, len(ids) + 1):
            cut = chat | {"max_tokens": limit}
            chunks = chunks_of(await daemon.stream(CHAT, cut))
            _, reply = await daemon.post(CHAT, cut | {"stream": False})
            text = reply["choices"][0]["message"]["content"]
            assert texts_of(chunks)[0] == text
            assert THREAD.startswith(text.removesuffix("\ufffd"))
            assert "\ufffd" not in texts_of(chunks[:-2]).get(0, "")


@in_loop
async def test_an_answer_that_is_cut_inside_a_character() -> None:
    """Case c01b; the engine is told what its schema would make it say."""
    body = case("c01b")
    schema = body.pop("response_format")["json_schema"]["schema"]
    answer = json.dumps({"answer": schema["properties"]["answer"]["enum"][0]}, ensure_ascii=False)
    async with running_daemon() as daemon:
        await daemon.post(CHAT, HI)
        ids = daemon.service.models.entries[0].model.tokenizer.encode(answer)
        daemon.engine.script = lambda request: [*ids, 513]
        texts = []
        for limit in range(1, len(ids) + 2):
            chunks = chunks_of(await daemon.stream(CHAT, body | {"max_tokens": limit}))
            _, reply = await daemon.post(CHAT, body | {"max_tokens": limit, "stream": False})
            choice = reply["choices"][0]
            texts.append(choice["message"]["content"])
            assert texts_of(chunks)[0] == texts[-1]
            assert choice["finish_reason"] == ("length" if limit <= len(ids) else "stop")
            assert answer.startswith(texts[-1].removesuffix("\ufffd"))
            assert "\ufffd" not in texts_of(chunks[:-2]).get(0, "")
        assert texts[-1] == answer and any(text.endswith("\ufffd") for text in texts)


@in_loop
async def test_stop_strings_across_tokens() -> None:
    async with running_daemon() as daemon:
        await daemon.post(CHAT, HI)
        tokenizer = daemon.service.models.entries[0].model.tokenizer
        ids = tokenizer.encode("one two END three")
        daemon.engine.script = lambda request: ids * 20
        body = HI | {"max_tokens": 100, "stop": ["o END", ""], "logprobs": True}
        _, reply = await daemon.post(CHAT, body)
        choice = reply["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("one tw", "stop")
        assert "one tw".startswith("".join(e["token"] for e in choice["logprobs"]["content"][:-1]))
        assert texts_of(chunks_of(await daemon.stream(CHAT, body | {"stream": True}))) == {0: "one tw"}
        await daemon.settle()
        assert len(daemon.engine.aborted) == 2


@in_loop
async def test_an_ordinary_stop_token_leaves_no_text() -> None:
    async with running_daemon() as daemon:
        _, reply = await daemon.post(COMPLETIONS, {"prompt": [40, 41, 42], "stop_token_ids": [42]})
        choice = reply["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("FG", "stop")
        assert reply["usage"]["completion_tokens"] == 3


@in_loop
async def test_overflow_is_refused_with_both_numbers() -> None:
    async with running_daemon() as daemon:
        for path, body, param in (
            (COMPLETIONS, {"prompt": [40] * 600}, "prompt"),
            (CHAT, HI | {"messages": [{"role": "user", "content": "漢" * 600}]}, "messages"),
        ):
            status, answer = await daemon.post(path, body | {"stream": True})
            error = answer["error"]
            assert status == 400 and error["code"] == "context_length_exceeded" and error["param"] == param
            assert error["n_ctx"] == 512 and error["n_prompt_tokens"] >= 600
            assert "512" in error["message"] and str(error["n_prompt_tokens"]) in error["message"]
            assert not daemon.engine.seen


@in_loop
async def test_long_prompts_are_made_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_loop: list[bool] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, **how: Any) -> list[int]:
        in_the_loop.append(threading.current_thread() is threading.main_thread())
        return encode(self, text, **how)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    message = {"role": "user", "content": "x"}
    async with running_daemon() as daemon:
        for path, body in (
            (CHAT, {"messages": [message]}),
            (CHAT, {"messages": [message] * 2000}),
            (CHAT, {"messages": [message | {"content": "x" * 30_000}]}),
            (COMPLETIONS, {"prompt": "x"}),
            (COMPLETIONS, {"prompt": ["x" * 10_000] * 3}),
        ):
            in_the_loop.clear()
            short = "x" in body.values() or body.get("messages") == [message]
            assert (await daemon.post(path, {"max_tokens": 1} | body))[0] == (200 if short else 400)
            # A chat waits for the process that renders it, however short it is.
            assert set(in_the_loop) == {short and path == COMPLETIONS}


@in_loop
async def test_statuses_of_what_cannot_be_served() -> None:
    async with running_daemon(max_queue=2) as daemon:
        status, answer = await daemon.post(CHAT, HI | {"model": "nosuch"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        for failure, status in (
            (UnsupportedModelError("architecture X"), 500),
            (CapacityError("no memory"), 503),
            (RuntimeError("a bug"), 500),
        ):
            daemon.engines.failures.append(failure)
            found, answer = await daemon.post(CHAT, HI)
            assert found == status and answer["error"]["type"] == "server_error"
            assert isinstance(failure, RuntimeError) or str(failure) in answer["error"]["message"]
        await refused(daemon, CHAT, HI | {"n": 3}, "n")
        await refused(daemon, COMPLETIONS, {"prompt": ["a"] * 3}, "n")
        assert (await daemon.post(CHAT, HI))[0] == 200
        daemon.engine.gate.clear()
        first = asyncio.create_task(daemon.post(CHAT, HI))
        await until_so(lambda: daemon.engine.running)
        async with daemon.session.post(f"http://x{CHAT}", json=HI | {"n": 2}) as response:
            assert response.status == 429 and response.headers["Retry-After"]
        daemon.engine.gate.set()
        assert (await first)[0] == 200
        async with daemon.session.post(f"http://x{CHAT}", data=io.BytesIO(bytes(65 * 2**20))) as response:
            assert response.status == 413 and "error" in await response.json()
        assert (await daemon.get("/v1/nothing"))[0] == 404
        assert (await daemon.get(CHAT))[0] == 405
        assert (await daemon.post(CHAT, HI))[0] == 200


@in_loop
async def test_a_model_without_template_is_for_completions_only() -> None:
    async with running_daemon(template=None) as daemon:
        assert "no chat template" in await refused(daemon, CHAT, HI, "model")
        assert (await daemon.post(COMPLETIONS, {"prompt": "hi"}))[0] == 200


@in_loop
async def test_errors_after_the_headers_are_told_in_the_stream() -> None:
    async with running_daemon() as daemon:
        await daemon.post(CHAT, HI)

        def fails(request: object) -> list[int]:
            raise GenerationError("layer 3 gave NaN")

        daemon.engine.script = fails
        stream = await daemon.stream(CHAT, HI | {"stream": True})
        *_, last = [frame for frame in stream.split("\n\n") if frame]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert error["message"] == "layer 3 gave NaN" and error["type"] == "server_error"
        status, answer = await daemon.post(CHAT, HI)
        assert status == 500 and answer["error"] == error


@in_loop
async def test_models_and_tolerant_paths() -> None:
    async with running_daemon() as daemon:
        path = daemon.store.get("tiny").path
        daemon.store.add("org/name:q4", path)
        _, listing = await daemon.get("/v1/models")
        assert [entry["id"] for entry in listing["data"]] == ["tiny", "org/name:q4"]
        assert listing["data"][0] == {
            "id": "tiny",
            "object": "model",
            "created": 1700000000,
            "owned_by": "quantd",
            "meta": None,
        }
        assert (await daemon.get("/v1/models/tiny:latest"))[1]["id"] == "tiny"
        for spelling in ("/v1/models/org/name:q4", "/models/org%2Fname%3Aq4/", "/v1/models/org%2Fname:q4"):
            status, entry = await daemon.get(spelling)
            assert (status, entry.get("id")) == (200, "org/name:q4"), spelling
        assert (await daemon.get("/v1/models/none"))[0] == 404
        for spelling in ("/chat/completions", "/v1/chat/completions/?beta=true"):
            assert (await daemon.post(spelling, HI))[0] == 200
        _, entry = await daemon.get("/v1/models/tiny")
        assert entry["max_model_len"] == 512


@in_loop
async def test_llama_servers_names_of_limits_and_penalties() -> None:
    """llama.vim and llama.vscode have a chat's prompt computed ahead so."""
    async with running_daemon() as daemon:
        body = {"messages": HI["messages"], "n_predict": 0, "samplers": [], "repeat_penalty": 1.1}
        status, reply = await daemon.post(CHAT, body)
        assert status == 200 and reply["usage"]["completion_tokens"] == 0
        assert reply["choices"][0]["finish_reason"] == "length"
        assert daemon.engine.seen[0].sampling.repetition_penalty == 1.1
        _, reply = await daemon.post(
            CHAT, HI | {"n_predict": 9, "repetition_penalty": 1.2, "repeat_penalty": 2}
        )
        assert reply["usage"]["completion_tokens"] == 4, "max_tokens goes before"
        assert daemon.engine.seen[1].sampling.repetition_penalty == 1.2
        for limit in (0, 3, -1):
            _, reply = await daemon.post(COMPLETIONS, {"prompt": "x", "n_predict": limit})
            assert reply["usage"]["completion_tokens"] == (limit if limit >= 0 else 511)
        assert (await daemon.post(CHAT, body | {"n_predict": -2}))[0] == 400
