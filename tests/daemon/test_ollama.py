"""Ollama's generate and chat over HTTP: lines, options, what is honoured and what is refused."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
from typing import Any

import pytest
from daemon_in_loop import Daemon, case, in_loop, running_daemon
from fake_models import CHATML, QWEN_INFILL, chat_tokenizer
from test_disconnects import open_request
from waiting import until_so

from quantd.daemon.wire.stream import Timing
from quantd.engine.errors import CapacityError
from quantd.engine.request import Request, SamplingParams

GENERATE, CHAT = "/api/generate", "/api/chat"
HI = [{"role": "user", "content": "hi"}]
INSTANT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z")
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


async def lines(daemon: Daemon, path: str, body: object) -> list[dict[str, Any]]:
    """All lines of a stream."""
    async with daemon.session.post(f"http://x{path}", json=body) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "application/x-ndjson"
        return [json.loads(line) for line in (await response.read()).splitlines()]


async def sampled(daemon: Daemon, options: object, **fields: object) -> Request:
    """The engine's request that these options become."""
    body = {"model": "tiny", "prompt": "hi", "stream": False, "options": options} | fields
    status, reply = await daemon.post(GENERATE, body)
    assert status == 200, reply
    return daemon.engine.seen[-1]


async def refusal(daemon: Daemon, path: str, body: object, status: int = 400) -> str:
    """The error of a request, in Ollama's shape."""
    found, reply = await daemon.post(path, body)
    assert found == status, reply
    assert list(reply) == ["error"] and isinstance(reply["error"], str)
    return reply["error"]


@in_loop
async def test_a_stream_of_lines() -> None:
    async with running_daemon() as daemon:
        body = {"model": "tiny:latest", "messages": HI, "options": {"num_predict": 5}}
        *parts, last = await lines(daemon, CHAT, body)
        assert all(INSTANT.fullmatch(line["created_at"]) for line in (*parts, last))
        assert all(line["model"] == "tiny:latest" for line in (*parts, last))
        assert {line["done"] for line in parts} == {False} and last["done"] is True
        assert "".join(line["message"]["content"] for line in parts) == "user\nhi\n"
        assert last["message"] == {"role": "assistant", "content": ""}
        assert (last["done_reason"], last["eval_count"]) == ("length", 5)
        assert last["prompt_eval_count"] == len(daemon.engine.seen[0].prompt)
        assert last["cached_prompt_tokens"] == last["prompt_eval_count"] // 2
        assert all(type(last[name]) is int and last[name] > 0 for name in DURATIONS)


@in_loop
async def test_whole_and_streamed_answers_are_the_same() -> None:
    async with running_daemon() as daemon:
        for path, ask in ((CHAT, {"messages": HI}), (GENERATE, {"prompt": "hi"})):
            body = {"model": "tiny", "options": {"num_predict": 7}} | ask
            *parts, last = await lines(daemon, path, body)
            status, whole = await daemon.post(path, body | {"stream": False})
            texts = [line["message"]["content"] if path == CHAT else line["response"] for line in parts]
            text = whole["message"]["content"] if path == CHAT else whole["response"]
            assert status == 200 and "".join(texts) == text
            changing = {"created_at", "message", "response", *DURATIONS}
            assert whole.keys() == last.keys()
            assert {key: whole[key] for key in whole.keys() - changing} == {
                key: last[key] for key in last.keys() - changing
            }


@in_loop
async def test_the_same_conversation_is_the_same_prompt_on_every_surface() -> None:
    async with running_daemon() as daemon:
        _, reply = await daemon.post(CHAT, case("c04d") | {"model": "tiny"})
        _, openai = await daemon.post("/v1/chat/completions", case("c04b") | {"model": "tiny"})
        _, anthropic = await daemon.post("/v1/messages", case("c04c") | {"model": "tiny"})
        _, generated = await daemon.post(GENERATE, {"model": "tiny", "prompt": "Say hi", "stream": False})
        counts = {
            reply["prompt_eval_count"],
            generated["prompt_eval_count"],
            openai["usage"]["prompt_tokens"],
            anthropic["usage"]["input_tokens"],
        }
        assert counts == {len(daemon.engine.seen[0].prompt)}


@in_loop
async def test_ollamas_own_defaults_where_the_model_has_none() -> None:
    async with running_daemon() as daemon:
        sampling = (await sampled(daemon, None)).sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 40, 0.9)
        assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.0, 1.0, None)
        (daemon.store.get("tiny").path / "generation_config.json").write_text('{"temperature": 0.6}')
        await daemon.service.models.unload("tiny")
        sampling = (await sampled(daemon, {})).sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 0, 1.0)


@in_loop
async def test_every_option_that_samples() -> None:
    async with running_daemon() as daemon:
        options = {
            "temperature": 0,
            "top_k": 5.0,
            "top_p": 0.5,
            "min_p": 0.1,
            "seed": 2**60 + 1,
            "repeat_penalty": 1.2,
            "presence_penalty": 0.3,
            "frequency_penalty": 0.4,
            "num_predict": 3,
        }
        sampling = (await sampled(daemon, options)).sampling
        expected = SamplingParams(
            temperature=0,
            top_k=5,
            top_p=0.5,
            min_p=0.1,
            seed=2**60 + 1,
            repetition_penalty=1.2,
            presence_penalty=0.3,
            frequency_penalty=0.4,
            max_tokens=3,
            stop_token_ids=sampling.stop_token_ids,
        )
        assert sampling == expected
        _, reply = await daemon.post(
            GENERATE,
            {"model": "tiny", "prompt": "abc", "raw": True, "stream": False, "options": {"stop": "b"}},
        )
        assert (reply["response"], reply["done_reason"]) == ("a", "stop")


@pytest.mark.parametrize(("given", "max_tokens"), [(-1, None), (-2, None), (0, 0), (4, 4), (4.0, 4)])
def test_num_predict(given: float, max_tokens: int | None) -> None:
    async def predict() -> None:
        async with running_daemon() as daemon:
            assert (await sampled(daemon, {"num_predict": given})).sampling.max_tokens == max_tokens

    in_loop(predict)()


@in_loop
async def test_num_ctx_bounds_the_request_and_loads_nothing_again() -> None:
    async with running_daemon() as daemon:
        for num_ctx in (20, 64.0, 30, 10**6, 0):  # as Aider asks for another with every turn
            _, reply = await daemon.post(
                CHAT, {"model": "tiny", "messages": HI, "stream": False, "options": {"num_ctx": num_ctx}}
            )
            end = min(num_ctx or math.inf, 512)
            assert reply["prompt_eval_count"] + reply["eval_count"] == end
            assert reply["done_reason"] == "length"
        assert len(daemon.engines.started) == 1
        reason = await refusal(daemon, CHAT, {"model": "tiny", "messages": HI, "options": {"num_ctx": 8}})
        prompt_len = len(daemon.engine.seen[0].prompt)
        assert f"{prompt_len} tokens" in reason and reason.endswith("is 8")


@pytest.mark.parametrize(
    "options",
    [
        {"typical_p": 1.0, "tfs_z": 1, "mirostat": 0, "mirostat_tau": 5.0, "repeat_last_n": 64},
        {"repeat_last_n": -1, "repeat_penalty": 1.1},
        {"repeat_last_n": 33},
        {"repeat_last_n": 33, "repeat_penalty": 1.0, "presence_penalty": 0},
        {"num_gpu": 1, "num_thread": 4, "use_mmap": True, "num_batch": 8, "num_keep": 5, "numa": False},
        {"temperature": None, "stop": None, "no_such_option": [1]},
        {"stop": []},
    ],
)
def test_options_that_change_nothing_here(options: dict[str, object]) -> None:
    async def ask() -> None:
        async with running_daemon() as daemon:
            await sampled(daemon, options)

    in_loop(ask)()


@in_loop
async def test_a_window_of_nothing_switches_penalties_off() -> None:
    async with running_daemon() as daemon:
        options = {"repeat_last_n": 0, "repeat_penalty": 1.5, "presence_penalty": 1, "frequency_penalty": 1}
        sampling = (await sampled(daemon, options)).sampling
        assert sampling.repetition_penalty == 1
        assert sampling.presence_penalty == sampling.frequency_penalty == 0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"options": {"typical_p": 0.7}}, "options.typical_p"),
        ({"options": {"mirostat": 1}}, "options.mirostat"),
        ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
        ({"options": {"repeat_last_n": 33, "repeat_penalty": 1.2}}, "options.repeat_last_n"),
        ({"options": {"num_ctx": 10.5}}, "options.num_ctx"),
        ({"options": {"num_ctx": -1}}, "options.num_ctx"),
        ({"options": {"num_predict": -3}}, "options.num_predict"),
        ({"options": {"seed": 2**64}}, "seed"),
        ({"options": {"temperature": "hot"}}, "options.temperature"),
        ({"options": {"top_p": 1.5}}, "top_p"),
        ({"options": {"stop": ["x"] * 17}}, "options.stop"),
        ({"shift": True}, "shift"),
        ({"keep_alive": "5 days"}, "keep_alive"),
        ({"think": "a lot"}, "think"),
        ({"think": True}, '"tiny" does not support thinking'),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"format": "xml"}, "format"),
        ({"images": ["aGk="]}, "images"),
        ({"suffix": "x"}, '"tiny" does not support insert'),
        ({"suffix": ""}, '"tiny" does not support insert'),
        ({"raw": True, "system": "x"}, "system"),
        ({"raw": True, "context": [1]}, "context"),
        ({"raw": True, "template": "x"}, "template"),
        ({"template": "{{ .System }} {{ .Prompt }}"}, "template"),
        ({"context": [40, 10**6]}, "1000000"),
        ({"model": ""}, "model is required"),
    ],
)
def test_what_is_refused_by_name(fields: dict[str, object], named: str) -> None:
    async def refused() -> None:
        async with running_daemon() as daemon:
            assert named in await refusal(daemon, GENERATE, {"model": "tiny", "prompt": "hi"} | fields)

    in_loop(refused)()


@in_loop
async def test_bodies_that_are_none_and_models_that_are_not_there() -> None:
    async with running_daemon() as daemon:
        assert "'nosuch'" in await refusal(daemon, CHAT, {"model": "nosuch", "messages": HI}, 404)
        for data in (b"", b"{", b"[]", b'{"model": 3}'):
            async with daemon.session.post(f"http://x{CHAT}", data=data) as response:
                assert response.status == 400 and list(await response.json()) == ["error"]
        messages = [{"role": "user", "content": "hi", "images": ["aGk="]}]
        assert "messages[0].images" in await refusal(daemon, CHAT, {"model": "tiny", "messages": messages})
        messages = [{"role": "critic", "content": "hi"}]
        assert "messages[0].role" in await refusal(daemon, CHAT, {"model": "tiny", "messages": messages})


@in_loop
async def test_no_more_than_the_queue_holds() -> None:
    async with running_daemon(max_queue=1) as daemon:
        await daemon.service.load("tiny")
        daemon.engine.gate.clear()
        with open_request(daemon, {"model": "tiny", "messages": HI}, CHAT):
            await until_so(lambda: bool(daemon.engine.running))
            assert "try again" in await refusal(daemon, CHAT, {"model": "tiny", "messages": HI}, 503)


@in_loop
async def test_an_empty_prompt_loads_and_zero_unloads() -> None:
    async with running_daemon() as daemon:
        for path, piece in (
            (GENERATE, {"response": ""}),
            (CHAT, {"message": {"role": "assistant", "content": ""}}),
        ):
            status, reply = await daemon.post(path, {"model": "tiny", "keep_alive": "10m"})
            assert status == 200 and reply.pop("created_at")
            assert reply == {"model": "tiny", "done": True, "done_reason": "load"} | piece
            model = daemon.service.models.entries[0].model
            assert not daemon.engine.seen and 590 < model.keep_alive.seconds_left <= 600
            status, reply = await daemon.post(path, {"model": "tiny", "keep_alive": 0})
            assert (status, reply["done_reason"]) == (200, "unload")
            assert daemon.engine.closed and not daemon.service.models.entries
        status, reply = await daemon.post(CHAT, {"model": "tiny", "messages": [], "keep_alive": 0})
        assert (status, reply["done_reason"]) == (200, "unload")
        assert len(daemon.engines.started) == 2


@in_loop
async def test_unloading_ends_nobodys_work() -> None:
    async with running_daemon() as daemon:
        await daemon.service.load("tiny")
        daemon.engine.gate.clear()
        body = {"model": "tiny", "messages": HI, "stream": False, "options": {"num_predict": 3}}
        answer = asyncio.create_task(daemon.post(CHAT, body))
        await until_so(lambda: bool(daemon.engine.running))
        status, reply = await daemon.post(GENERATE, {"model": "tiny", "keep_alive": 0})
        assert (status, reply["done_reason"]) == (200, "unload")
        gone = daemon.service.models.entries[0].gone
        daemon.engine.gate.set()
        status, reply = await answer
        assert status == 200 and reply["eval_count"] == 3
        await gone.wait()


@pytest.mark.parametrize(
    ("fields", "seconds"),
    [
        ({"keep_alive": 1800}, 1800),
        ({"keep_alive": "5m"}, 300),
        ({"keep_alive": -1}, math.inf),
        ({"keep_alive": "-1"}, math.inf),
        ({"options": {"keep_alive": "5m", "num_ctx": 128}}, 300),
    ],
)
def test_how_long_a_request_keeps_the_model(fields: dict[str, object], seconds: float) -> None:
    async def keep() -> None:
        async with running_daemon() as daemon:
            await sampled(daemon, fields.pop("options", None), **fields)
            left = daemon.service.models.entries[0].model.keep_alive.seconds_left
            assert left == pytest.approx(seconds, abs=5)

    in_loop(keep)()


@in_loop
async def test_system_raw_template_and_context() -> None:
    async with running_daemon() as daemon:
        request = await sampled(daemon, {"num_predict": 2}, system="Be brief.")
        decode = daemon.service.models.entries[0].model.tokenizer.decode
        assert decode(request.prompt) == "system\nBe brief.\nuser\nhi\nassistant\n"
        assert decode((await sampled(daemon, None, raw=True)).prompt) == "hi"
        assert decode((await sampled(daemon, None, template="<{{ messages[-1].content }}>")).prompt) == "<hi>"
        body = {"model": "tiny", "prompt": "hi", "options": {"num_predict": 3}}
        *_, last = await lines(daemon, GENERATE, body)
        assert (
            last["context"]
            == daemon.engine.seen[-1].prompt + daemon.engine.script(daemon.engine.seen[-1])[:3]
        )
        request = await sampled(daemon, None, context=last["context"], prompt="next")
        assert decode(request.prompt) == "user\nhi\nassistant\nuser\nuser\nnext\nassistant\n"
        assert "context" not in (await lines(daemon, GENERATE, body | {"raw": True}))[-1]


@in_loop
async def test_a_model_without_a_chat_template_goes_on_from_the_prompt() -> None:
    async with running_daemon(template=None) as daemon:
        request = await sampled(daemon, None)
        assert daemon.service.models.entries[0].model.tokenizer.decode(request.prompt) == "hi"
        assert "no chat template" in await refusal(daemon, CHAT, {"model": "tiny", "messages": HI})


@pytest.mark.parametrize("begun", ["Sure, ", "x", ""])
def test_an_answer_that_has_begun_goes_on(begun: str) -> None:
    async def go_on() -> None:
        async with running_daemon() as daemon:
            messages = [*HI, {"role": "assistant", "content": begun}]
            body = {"model": "tiny", "messages": messages, "stream": False, "options": {"num_predict": 3}}
            status, reply = await daemon.post(CHAT, body)
            assert status == 200 and reply["eval_count"] == 3
            prompt = daemon.service.models.entries[0].model.tokenizer.decode(daemon.engine.seen[0].prompt)
            assert prompt == "user\nhi\nassistant\n" + begun

    in_loop(go_on)()


@in_loop
async def test_a_suffix_is_infill_also_an_empty_one() -> None:
    async with running_daemon(tokens=QWEN_INFILL) as daemon:
        body = case("c31") | {"model": "tiny"}
        prompts = []
        for suffix in ("", " "):
            for raw in (False, True):  # as Continue sends it
                status, reply = await daemon.post(GENERATE, body | {"suffix": suffix, "raw": raw})
                assert status == 200 and reply["response"] is not None
                prompts.append(daemon.engine.seen[-1].prompt)
                assert reply["prompt_eval_count"] == len(prompts[-1])
        tokenizer = daemon.service.models.entries[0].model.tokenizer
        before, after, middle = (
            tokenizer.token_id(f"<|fim_{name}|>") for name in ("prefix", "suffix", "middle")
        )
        text = tokenizer.encode(body["prompt"])
        assert prompts[0] == prompts[1] == [before, *text, after, middle]
        assert prompts[2] == [before, *text, after, *tokenizer.encode(" "), middle]
        status, _ = await daemon.post(GENERATE, body | {"prompt": "", "suffix": "x"})
        assert status == 200 and len(daemon.engine.seen) == 5
        assert "system" in await refusal(daemon, GENERATE, body | {"system": "x"})


@in_loop
async def test_the_oldest_turns_are_left_out_only_where_the_request_says_so() -> None:
    async with running_daemon() as daemon:
        turns = [
            {"role": role, "content": f"{role} {number} " + "word " * 20}
            for number in range(5)
            for role in ("user", "assistant")
        ]
        messages = [{"role": "system", "content": "Be brief."}, *turns, {"role": "user", "content": "last"}]
        body = {"model": "tiny", "messages": messages, "stream": False, "options": {"num_ctx": 300}}
        for truncate in (None, False):
            assert "300" in await refusal(daemon, CHAT, body | {"truncate": truncate})
        status, reply = await daemon.post(CHAT, body | {"truncate": True})
        assert status == 200 and reply["prompt_eval_count"] < 300
        text = daemon.service.models.entries[0].model.tokenizer.decode(daemon.engine.seen[-1].prompt)
        assert text.startswith("system\nBe brief.\nuser\nuser ") and "user 0" not in text
        assert text.endswith("user\nlast\nassistant\n") and "assistant 4" in text
        long = {"model": "tiny", "prompt": "word " * 600, "truncate": True}
        assert "512" in await refusal(daemon, GENERATE, long)


@pytest.mark.parametrize(("path", "ask"), [(CHAT, {"messages": HI}), (GENERATE, {"prompt": "hi"})])
def test_the_form_of_an_answer(path: str, ask: dict[str, object]) -> None:
    async def form() -> None:
        async with running_daemon() as daemon:
            schema = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
            grammars = []
            for format in (schema, "json", {}, "", None):
                body = {"model": "tiny", "stream": False, "format": format, "options": {"num_predict": 1}}
                assert (await daemon.post(path, body | ask))[0] == 200
                grammars.append(daemon.engine.seen[-1].sampling.grammar)
            assert "age" in grammars[0] and "object" in grammars[1] and "object" not in grammars[2]
            assert grammars[3:] == [None, None]
            for bad in ({"type": "object", "not": {}}, {"type": "integer", "multipleOf": "x"}):
                assert "format" in await refusal(daemon, path, {"model": "tiny", "format": bad} | ask)

    in_loop(form)()


@in_loop
async def test_log_probabilities() -> None:
    async with running_daemon() as daemon:
        body = {
            "model": "tiny",
            "messages": HI,
            "logprobs": True,
            "top_logprobs": 2,
            "options": {"num_predict": 4},
        }
        streamed = [entry for line in await lines(daemon, CHAT, body) for entry in line.get("logprobs", [])]
        _, whole = await daemon.post(CHAT, body | {"stream": False})
        assert streamed == whole["logprobs"]
        assert bytes(b for entry in streamed for b in entry["bytes"]).decode() == whole["message"]["content"]
        assert [len(entry["top_logprobs"]) for entry in streamed] == [2] * len(streamed)
        assert streamed[0]["logprob"] == -0.5 and streamed[0].keys() == {
            "token",
            "logprob",
            "bytes",
            "top_logprobs",
        }
        _, without = await daemon.post(CHAT, body | {"stream": False, "logprobs": False})
        assert "logprobs" not in without


@in_loop
async def test_signs_of_life_are_lines_that_say_nothing() -> None:
    async with running_daemon(timing=Timing(ping_seconds=0.01)) as daemon:
        daemon.engines.release = asyncio.Event()
        body = {"model": "tiny", "messages": HI, "options": {"num_predict": 2}}
        async with daemon.session.post(f"http://x{CHAT}", json=body) as response:
            sign = json.loads(await response.content.readline())
            assert sign.pop("created_at")
            assert sign == {"model": "tiny", "message": {"role": "assistant", "content": ""}, "done": False}
            daemon.engines.release.set()
            rest = [json.loads(line) for line in (await response.read()).splitlines()]
        assert rest[-1]["done"] and rest[-1]["eval_count"] == 2


@in_loop
async def test_an_error_in_a_stream_is_its_last_line() -> None:
    async with running_daemon(timing=Timing(ping_seconds=0.01)) as daemon:
        daemon.engines.release = asyncio.Event()
        daemon.engines.failures.append(CapacityError("no room"))
        async with daemon.session.post(
            f"http://x{GENERATE}", json={"model": "tiny", "prompt": "x"}
        ) as response:
            await response.content.readline()
            daemon.engines.release.set()
            assert json.loads((await response.read()).splitlines()[-1]) == {"error": "no room"}


@in_loop
async def test_what_clients_probe() -> None:
    async with running_daemon() as daemon:
        for method in ("GET", "HEAD"):
            async with daemon.session.request(method, "http://x/") as response:
                assert response.status == 200 and response.headers["Content-Type"].startswith("text/plain")
                assert await response.text() == ("Ollama is running" if method == "GET" else "")
            for path in ("/api/version", "/api/tags"):
                async with daemon.session.request(method, f"http://x{path}") as response:
                    assert response.status == 200
        _, version = await daemon.get("/api/version")
        assert tuple(map(int, version["version"].split("."))) >= (0, 6, 4)
        assert (await daemon.get("/api/status"))[1] == {"cloud": {"disabled": True, "source": "config"}}
        assert (await daemon.post("/api/me", {}))[0] == 401


@in_loop
async def test_tools_and_reasoning_of_a_model_that_has_both() -> None:
    said = (
        "<think>\nHm.\n</think>\n\nWell.\n<tool_call>\n"
        '{"name": "look", "arguments": {"place": "é\\n", "deep": {"n": 4}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    )
    template = CHATML + "{% if tools %}{{ tools }}<tool_call>{% endif %}<think></think>"
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    body = {
        "model": "tiny",
        "messages": HI,
        "tools": [{"type": "function", "function": function}],
        "think": True,
    }
    script = [*chat_tokenizer().encode(said).ids, 513]
    async with running_daemon(lambda _: script, template) as daemon:
        *parts, last = await lines(daemon, CHAT, body)
        status, whole = await daemon.post(CHAT, body | {"stream": False})
        assert status == 200 and whole["done_reason"] == last["done_reason"] == "stop"
        message = whole["message"]
        assert message["thinking"] == "".join(line["message"].get("thinking", "") for line in parts) == "Hm."
        assert message["content"] == "".join(line["message"]["content"] for line in parts) == "Well."
        calls = [call for line in (*parts, last) for call in line["message"].get("tool_calls", [])]
        expected = [{"place": "é\n", "deep": {"n": 4}}, {}]
        for found in (message["tool_calls"], calls):
            assert [call["function"]["arguments"] for call in found] == expected
            assert [(call["function"]["index"], call["function"]["name"]) for call in found] == [
                (0, "look"),
                (1, "look"),
            ]
            assert len({call["id"] for call in found}) == 2
        assert len(last["message"]["tool_calls"]) == 1


@in_loop
async def test_a_call_that_is_held_back_for_long_shows_life() -> None:
    said = '<tool_call>\n{"name": "f", "arguments": {"text": "' + "so much " * 30 + '"}}\n</tool_call>'
    script = [*chat_tokenizer().encode(said).ids, 513]
    template = CHATML + "{{ tools }}<tool_call>"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    async with running_daemon(lambda _: script, template, timing=Timing(ping_seconds=0.01)) as daemon:
        await daemon.service.load("tiny")
        daemon.engine._step = functools.partial(asyncio.sleep, 0.002)
        *signs, last = await lines(daemon, CHAT, {"model": "tiny", "messages": HI, "tools": tools})
        assert len(signs) > 20 and {line["message"]["content"] for line in signs} == {""}
        assert len(last["message"]["tool_calls"]) == 1
