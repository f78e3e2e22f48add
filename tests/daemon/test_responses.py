"""Responses over the daemon: items as prompts, bodies as Codex sends them, state, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from daemon_in_loop import Daemon, case, in_loop, running_daemon
from fake_models import CHATML
from waiting import until_so

from quantd.daemon.errors import GenerationError
from quantd.daemon.wire.encodings import zstd

RESPONSES = "/v1/responses"
HI = {"model": "tiny", "input": "hi", "max_output_tokens": 4}
TOOL = {"type": "function", "name": "read", "description": "Reads", "parameters": {"type": "object"}}
BOS_ID = 1
# Writes what it gets, so that a prompt shows it. It teaches <tool_call>.
TEMPLATE = (
    "{# <tool_call> arguments #}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% if m.tool_call_id %}@{{ m.tool_call_id }}{% endif %}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)


def last_prompt(daemon: Daemon) -> str:
    model = daemon.service.models.entries[0].model
    return model.tokenizer.decode(daemon.engine.seen[-1].prompt)


async def prompt_of(daemon: Daemon, body: dict[str, Any]) -> str:
    """The prompt that a body becomes."""
    status, reply = await daemon.post(RESPONSES, HI | body)
    assert status == 200, reply
    return last_prompt(daemon)


async def refused(daemon: Daemon, body: dict[str, Any], param: str, *words: str) -> None:
    """Check for a 400 that names the field, streamed or not."""
    for stream in (False, True):
        status, answer = await daemon.post(RESPONSES, {"stream": stream} | HI | body)
        assert status == 400, (body, answer)
        error = answer["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", param), (body, error)
        assert all(word in error["message"] for word in words), error


@in_loop
async def test_what_a_template_refuses_is_of_the_input() -> None:
    template = "{{ raise_exception('no such talk') }}"
    async with running_daemon(template=template) as daemon:
        await refused(daemon, {}, "input", "no such talk")
        status, answer = await daemon.post(f"{RESPONSES}/input_tokens", {"model": "tiny", "input": "hi"})
        assert (status, answer["error"]["param"]) == (400, "input")


async def deleted(daemon: Daemon, id: str) -> tuple[int, Any]:
    async with daemon.session.delete(f"http://x{RESPONSES}/{id}") as response:
        return response.status, await response.json()


@pytest.mark.parametrize(("template", "num_bos"), [(CHATML, 0), ("{{ bos_token }}" + CHATML, 1)])
def test_the_same_conversation_costs_the_same_everywhere(template: str, num_bos: int) -> None:
    in_loop(check_costs)(template=template, num_bos=num_bos)


async def check_costs(template: str, num_bos: int) -> None:
    """Cases c04, c04b and c04c."""
    async with running_daemon(template=template) as daemon:
        _, chat = await daemon.post("/v1/chat/completions", case("c04b"))
        status, reply = await daemon.post(RESPONSES, case("c04"))
        _, message = await daemon.post("/v1/messages", case("c04c"))
        expected = chat["usage"]["prompt_tokens"]
        assert status == 200 and reply["usage"]["input_tokens"] == expected
        assert message["usage"]["input_tokens"] == expected
        prompts = {tuple(request.prompt) for request in daemon.engine.seen}
        assert len(prompts) == 1 and prompts.pop().count(BOS_ID) == num_bos
        body = {"model": "tiny", "input": case("c04")["input"]}
        _, count = await daemon.post(f"{RESPONSES}/input_tokens", body)
        assert count == {"object": "response.input_tokens", "input_tokens": expected}


def said(role: str, *texts: str) -> dict[str, Any]:
    kind = "output_text" if role == "assistant" else "input_text"
    return {"type": "message", "role": role, "content": [{"type": kind, "text": text} for text in texts]}


CALLS = [
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
    said("assistant", "I look"),
    {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"n": 4}'},
    {"type": "function_call", "call_id": "c2", "name": "read", "arguments": ""},
    {"type": "custom_tool_call", "call_id": "c3", "name": "patch", "input": "*** Begin"},
    {"type": "function_call_output", "call_id": "c1", "output": "12"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "13"}]},
    {"type": "custom_tool_call_output", "call_id": "c3", "output": "done"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search"}},
    {"type": "local_shell_call", "call_id": "c4", "status": "completed", "action": {"type": "exec"}},
    {
        "type": "reasoning",
        "id": "rs_2",
        "summary": [{"type": "summary_text", "text": "so"}],
        "content": None,
        "encrypted_content": "gAAA",
    },
    said("assistant", "It is 12"),
    said("user", "and"),
]
CONVERSATIONS = [
    ({"input": "hi"}, "[user]hi"),
    ({"input": [{"role": "user", "content": "hi"}]}, "[user]hi"),
    ({"input": [said("user", "a", "b")], "instructions": "Be brief."}, "[system]Be brief.[user]a\nb"),
    (
        {"input": [said("developer", "A"), said("system", "B"), said("user", "x")]},
        "[system]A[system]B[user]x",
    ),
    ({"input": [{"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}]}, "[assistant]no"),
    (
        {"input": [said("user", "go"), *CALLS]},
        '[user]go[assistant](hm)I lookc1:read{"n": 4}c2:read{}c3:patch{"input": "*** Begin"}'
        "[tool]12@c1[tool]13@c2[tool]done@c3[assistant](so)It is 12[user]and",
    ),
]


@pytest.mark.parametrize(("body", "prompt"), CONVERSATIONS)
def test_conversations_as_templates_read_them(body: dict[str, Any], prompt: str) -> None:
    async def read() -> None:
        async with running_daemon(template=TEMPLATE) as daemon:
            assert await prompt_of(daemon, body) == prompt

    in_loop(read)()


@in_loop
async def test_a_body_as_codex_sends_it() -> None:
    """Compressed, with kinds of tools that no local model knows."""
    async with running_daemon(template=TEMPLATE) as daemon:
        body = {
            "model": "tiny",
            "instructions": "You are a coding agent.",
            "input": [
                said("developer", "<permissions>all</permissions>"),
                said("user", "<environment_context/>"),
                said("user", "hi"),
            ],
            "tools": [
                TOOL | {"strict": False},
                {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark"}},
                {"type": "local_shell"},
                {"type": "web_search", "external_web_access": False},
                {"type": "image_generation", "output_format": "png"},
                {"type": "namespace", "name": "mcp__notes", "description": "Notes.", "tools": [TOOL]},
                {"type": "tool_search", "execution": "client"},
            ],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"effort": "medium", "summary": "auto"},
            "store": False,
            "stream": True,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "0198",
            "text": {"verbosity": "low"},
            "client_metadata": {"x-codex-installation-id": "1"},
        }
        headers = {
            "Content-Encoding": "zstd",
            "Content-Type": "application/json",
            "Accept": "text/event-stream",
        }
        data = zstd.compress(json.dumps(body).encode())
        async with daemon.session.post(f"http://x{RESPONSES}", data=data, headers=headers) as response:
            assert response.status == 200, await response.text()
            events = [line for line in (await response.text()).split("\n") if line.startswith("data: ")]
        first, *_, last = (json.loads(line.removeprefix("data: ")) for line in events)
        assert (first["type"], last["type"]) == ("response.created", "response.incomplete")
        assert last["response"]["text"] == {"format": {"type": "text"}}
        function = {name: TOOL[name] for name in ("name", "description", "parameters")}
        told = [
            function | {"strict": False},
            function | {"name": "mcp__notes__read", "description": "Notes.\n\nReads"},
        ]
        assert last_prompt(daemon) == (
            "[system]You are a coding agent.[system]<permissions>all</permissions>"
            "[user]<environment_context/>[user]hi"
            + json.dumps([{"type": "function", "function": function} for function in told])
        )
        assert (await daemon.get(f"{RESPONSES}/{last['response']['id']}"))[0] == 404


NOTES = {
    "type": "namespace",
    "name": "mcp__notes__",
    "description": "The user's notes.",
    "tools": [TOOL, {"type": "custom", "name": "draw"}, TOOL | {"name": "write"}],
}


async def saying(daemon: Daemon, text: str) -> None:
    """Make the engine, which this starts, say a text and end."""
    await daemon.post(RESPONSES, HI)
    ids = [*daemon.service.models.entries[0].model.tokenizer.encode(text), 2]
    daemon.engine.script = lambda request: ids


@in_loop
async def test_calls_of_functions_in_namespaces() -> None:
    """A name is one to the model and two to the client, there and back."""
    async with running_daemon(template=TEMPLATE) as daemon:
        await saying(
            daemon, '<tool_call>\n{"name": "mcp__notes__write", "arguments": {"n": 4}}\n</tool_call>'
        )
        body = {"model": "tiny", "input": "hi", "tools": [TOOL, NOTES]}
        _, whole = await daemon.post(RESPONSES, body)
        [call] = whole["output"]
        assert (call["type"], call["name"], call["namespace"]) == ("function_call", "write", "mcp__notes__")
        text = await daemon.stream(RESPONSES, body | {"stream": True})
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
        items = [event["item"] for event in events if "item" in event]
        assert [(item["name"], item["namespace"]) for item in items] == [("write", "mcp__notes__")] * 2
        assert events[-1]["response"]["output"] == [items[-1]]
        assert [tool["name"] for tool in whole["tools"][1]["tools"]] == ["read", "write"]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "done"}
        await daemon.post(RESPONSES, body | {"input": [said("user", "go"), call, output]})
        assert f'{call["call_id"]}:mcp__notes__write{{"n": 4}}[tool]done' in last_prompt(daemon)
        tools = json.loads(last_prompt(daemon).rpartition(call["call_id"])[2])
        assert [(tool["function"]["name"], tool["function"]["description"]) for tool in tools] == [
            ("read", "Reads"),
            ("mcp__notes__read", "The user's notes.\n\nReads"),
            ("mcp__notes__write", "Reads"),
        ]


@in_loop
async def test_a_function_in_a_namespace_can_be_forced() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        chosen = {"type": "function", "name": "write", "namespace": "mcp__notes__"}
        body = {"tools": [TOOL, NOTES], "tool_choice": chosen}
        await prompt_of(daemon, body)
        grammar = daemon.engine.seen[-1].sampling.grammar
        assert grammar is not None and "mcp__notes__write" in grammar and "read" not in grammar
        await refused(daemon, body | {"tool_choice": {"type": "function", "name": "write"}}, "tool_choice")


@in_loop
async def test_efforts() -> None:
    template = "{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }}"
    async with running_daemon(template=template) as daemon:
        for effort, seen in (
            (None, " "),
            ("none", "False none"),
            ("minimal", "False minimal"),
            ("low", "True low"),
        ):
            assert await prompt_of(daemon, {"reasoning": {"effort": effort}}) == f"hi {seen}"


@in_loop
async def test_turns_that_go_on_from_earlier_ones() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        _, first = await daemon.post(RESPONSES, HI | {"instructions": "A"})
        text = first["output"][0]["content"][0]["text"]
        more = {"input": "more", "previous_response_id": first["id"]}
        status, second = await daemon.post(RESPONSES, HI | more)
        assert status == 200 and second["previous_response_id"] == first["id"]
        assert last_prompt(daemon) == f"[user]hi[assistant]{text}[user]more"
        assert await prompt_of(daemon, more | {"instructions": "B", "store": False}) == (
            f"[system]B[user]hi[assistant]{text}[user]more"
        )
        references = [{"type": "item_reference", "id": first["output"][0]["id"]}, said("user", "x")]
        assert await prompt_of(daemon, {"input": references}) == f"[assistant]{text}[user]x"
        _, page = await daemon.get(f"{RESPONSES}/{second['id']}/input_items?order=asc")
        kinds = [(item["role"], item["content"][0]["text"]) for item in page["data"]]
        assert kinds == [("user", "hi"), ("assistant", text), ("user", "more")]
        assert (await deleted(daemon, first["id"]))[0] == 200
        await refused(daemon, more, "previous_response_id", first["id"])
        status, answer = await daemon.post(RESPONSES, HI | more)
        assert answer["error"]["code"] == "previous_response_not_found"
        status, _ = await daemon.post(RESPONSES, HI | more | {"previous_response_id": second["id"]})
        assert status == 200
        await refused(
            daemon,
            {"input": [said("user", "x"), {"type": "message", "role": "x", "content": ""}]},
            "input[1].role",
        )


@in_loop
async def test_pages_of_input_items() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        _, reply = await daemon.post(RESPONSES, HI | {"input": [said("user", str(n)) for n in range(5)]})
        path = f"{RESPONSES}/{reply['id']}/input_items"

        async def numbers(query: str) -> tuple[list[str], bool]:
            status, page = await daemon.get(path + query)
            assert status == 200, page
            return [item["content"][0]["text"] for item in page["data"]], page["has_more"]

        assert await numbers("") == (["4", "3", "2", "1", "0"], False)
        assert await numbers("?limit=2") == (["4", "3"], True)
        _, page = await daemon.get(f"{path}?limit=2&order=asc")
        assert await numbers(f"?limit=3&order=asc&after={page['last_id']}") == (["2", "3", "4"], False)
        for query, param in (("?limit=0", "limit"), ("?order=up", "order"), ("?after=x", "after")):
            status, answer = await daemon.get(path + query)
            assert (status, answer["error"]["param"]) == (400, param)


@in_loop
async def test_in_the_background() -> None:
    async with running_daemon() as daemon:
        await daemon.post(RESPONSES, HI)
        daemon.engine.gate.clear()
        background = HI | {"background": True}
        status, begun = await daemon.post(RESPONSES, background)
        assert (status, begun["status"], begun["background"]) == (200, "in_progress", True)
        path = f"{RESPONSES}/{begun['id']}"
        assert (await daemon.get(path))[1] == begun
        await refused(daemon, {"previous_response_id": begun["id"]}, "previous_response_id", "in progress")
        daemon.engine.gate.set()
        await daemon.service.wait_idle()
        _, done = await daemon.get(path)
        assert (done["status"], done["usage"]["output_tokens"]) == ("incomplete", 4)
        assert (await daemon.post(f"{path}/cancel", {}))[1] == done

        daemon.engine.gate.clear()
        ids = [(await daemon.post(RESPONSES, background))[1]["id"] for _ in range(2)]
        await until_so(lambda: len(daemon.engine.running) >= 2)
        status, cancelled = await daemon.post(f"{RESPONSES}/{ids[0]}/cancel", {})
        assert (status, cancelled["status"]) == (200, "cancelled")
        assert (await deleted(daemon, ids[1]))[1] == {"id": ids[1], "object": "response", "deleted": True}
        await daemon.settle()
        assert len(daemon.engine.aborted) == 2
        daemon.engine.gate.set()

        def fails(request: object) -> list[int]:
            raise GenerationError("layer 3 gave NaN")

        daemon.engine.script = fails
        _, begun = await daemon.post(RESPONSES, background)
        await daemon.service.wait_idle()
        _, failed = await daemon.get(f"{RESPONSES}/{begun['id']}")
        assert failed["error"] == {"code": "server_error", "message": "layer 3 gave NaN"}


@in_loop
async def test_work_in_the_background_ends_with_the_daemon() -> None:
    async with running_daemon() as daemon:
        await daemon.post(RESPONSES, HI)
        engine = daemon.engine
        engine.gate.clear()
        await daemon.post(RESPONSES, HI | {"background": True})
        await until_so(lambda: engine.running)
    assert not engine.running and len(engine.aborted) == 1


@in_loop
async def test_overflow_in_both_forms() -> None:
    async with running_daemon() as daemon:
        body = HI | {"input": "x " * 600}
        status, answer = await daemon.post(RESPONSES, body | {"truncation": "auto"})
        error = answer["error"]
        assert (status, error["code"], error["n_ctx"]) == (400, "context_length_exceeded", 512)
        assert error["param"] == "input"
        assert str(error["n_prompt_tokens"]) in error["message"]
        text = await daemon.stream(RESPONSES, body | {"stream": True})
        last = json.loads(text.rstrip().rsplit("data: ", 1)[1])
        assert last["type"] == "response.failed"
        assert last["response"]["error"]["code"] == "context_length_exceeded"
        assert not daemon.engine.seen


def function(name: str) -> dict[str, Any]:
    return {
        "tools": [TOOL, {"type": "custom", "name": "patch"}],
        "tool_choice": {"type": "function", "name": name},
    }


ALLOWED = {"type": "allowed_tools", "mode": "required"}
REFUSALS = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0]", "compaction"),
    ({"input": [said("user", "x"), {"role": "tool", "content": "x"}]}, "input[1].role", "tool"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0]",
        "input_image",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0]", "input_file"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0]", "text"),
    ({"input": [{"role": "user"}]}, "input[0]", "content"),
    ({"input": [{"type": "function_call", "name": "f"}]}, "input[0]", "call_id"),
    (
        {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}]},
        "input[0].output[0]",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": "x"}, "top_p"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "all"}, "truncation"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"background": True, "store": False, "stream": False}, "background"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [{"type": "namespace", "tools": [TOOL]}]}, "tools[0].name"),
    ({"tools": [TOOL, NOTES | {"tools": [{"type": "function"}]}]}, "tools[1].tools[0].name"),
    ({"tools": [TOOL | {"name": "mcp__notes__read"}, NOTES]}, "tools[1].function.name", "mcp__notes__read"),
    ({"tool_choice": "any"}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    (function("write"), "tool_choice", "write"),
    (function("patch"), "tool_choice", "patch"),
    (function("read") | {"tool_choice": {"type": "custom", "name": "patch"}}, "tool_choice", "custom"),
    (function("read") | {"tool_choice": {"type": "web_search"}}, "tool_choice", "web_search"),
    (function("read") | {"tool_choice": ALLOWED | {"tools": []}}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    (
        {"input": [{"role": "user", "content": [{"type": ["input_text"], "text": "Hi"}]}]},
        "input[0].content[0]",
    ),
    ({"input": [{"role": "user", "content": "Hi", "id": ["a"]}]}, "input", "string"),
    ({"input": [{"role": "user", "content": "Hi", "id": {"a": 1}}]}, "input", "string"),
]


@in_loop
async def test_what_cannot_be_served_is_refused_by_name() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        for body, param, *words in REFUSALS:
            await refused(daemon, body, param, *words)
        assert not any(engine.seen for engine in daemon.engines.started)


@in_loop
async def test_allowed_tools() -> None:
    """All are in the prompt, so that it stays the same; of the others none can be called."""
    async with running_daemon(template=TEMPLATE) as daemon:
        other = TOOL | {"name": "write"}
        tools = [{"type": "function", "name": "write"}, {"type": "web_search"}]
        choice = {"type": "allowed_tools", "mode": "auto", "tools": tools}
        bodies = [{"tools": [TOOL, other]}, {"tools": [TOOL, other], "tool_choice": choice}]
        prompts = [await prompt_of(daemon, body) for body in bodies]
        assert prompts[0] == prompts[1]
        tools[0]["name"] = "delete"
        await refused(daemon, bodies[1], "tool_choice", "delete")


@in_loop
async def test_null_means_default_and_unknown_fields_are_ignored() -> None:
    async with running_daemon() as daemon:
        names = (
            "instructions previous_response_id tools tool_choice parallel_tool_calls reasoning text "
            "truncation conversation prompt stream store background temperature top_p top_logprobs include "
            "metadata service_tier user prompt_cache_key safety_identifier max_tool_calls stream_options"
        )
        status, reply = await daemon.post(
            RESPONSES, HI | dict.fromkeys(names.split()) | {"no_such_field": {}}
        )
        assert status == 200, reply
        await daemon.post(RESPONSES, HI)
        first, second = daemon.engine.seen
        assert (first.prompt, first.sampling) == (second.prompt, second.sampling)


@in_loop
async def test_what_is_not_there_is_not_found() -> None:
    async with running_daemon() as daemon:
        for path in (f"{RESPONSES}/resp_no", f"{RESPONSES}/resp_no/input_items"):
            status, answer = await daemon.get(path)
            assert status == 404 and "resp_no" in answer["error"]["message"]
        assert (await daemon.post(f"{RESPONSES}/resp_no/cancel", {}))[0] == 404
        assert (await deleted(daemon, "resp_no"))[0] == 404
        _, reply = await daemon.post("/responses/", HI)
        assert (await daemon.get(f"/responses/{reply['id']}/"))[1] == reply
        assert (await daemon.get(f"/responses/{reply['id']}?stream=true"))[0] == 400
        status, answer = await daemon.post(f"/v1/v1/responses/{reply['id']}/cancel", {})
        assert status == 400 and "background" in answer["error"]["message"]
