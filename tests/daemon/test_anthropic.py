"""Anthropic's wire over the daemon: conversations as prompts, bodies as Claude Code sends them, refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
from daemon_in_loop import Daemon, case, in_loop, running_daemon

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"type": "text", "text": "Say hi"}
TOOL = {"name": "read", "description": "Reads", "input_schema": {"type": "object", "properties": {}}}
# Writes what it gets, so that a prompt shows it. It teaches <tool_call>.
TEMPLATE = (
    "{# <tool_call> arguments #}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% if m.tool_call_id %}@{{ m.tool_call_id }}{% endif %}"
    "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)


async def prompt_of(daemon: Daemon, body: dict[str, Any]) -> str:
    """The prompt that a body becomes."""
    status, reply = await daemon.post(MESSAGES, HI | body)
    assert status == 200, reply
    model = daemon.service.models.entries[0].model
    return model.tokenizer.decode(daemon.engine.seen[-1].prompt)


async def refused(daemon: Daemon, body: dict[str, Any], *words: str) -> None:
    """Check for a 400 in Anthropic's shape with these words, streamed or not."""
    for stream in (False, True):
        status, answer = await daemon.post(MESSAGES, HI | body | {"stream": stream})
        assert status == 400 and answer["type"] == "error", (body, answer)
        assert answer["error"]["type"] == "invalid_request_error"
        assert all(word in answer["error"]["message"] for word in words), answer


@in_loop
async def test_the_same_conversation_costs_the_same_everywhere() -> None:
    """Cases c04b and c04c, cold and warm."""
    async with running_daemon() as daemon:
        for _ in range(2):
            _, chat = await daemon.post("/v1/chat/completions", case("c04b"))
            status, reply = await daemon.post(MESSAGES, case("c04c"))
            assert status == 200
            assert reply["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
            assert daemon.engine.seen[-1].prompt == daemon.engine.seen[-2].prompt
        body = {name: value for name, value in case("c04c").items() if name in ("model", "messages")}
        assert (await daemon.post(COUNT, body))[1] == {"input_tokens": chat["usage"]["prompt_tokens"]}
        body["messages"].append({"role": "assistant", "content": "Hi"})
        status, answer = await daemon.post(COUNT, body)
        assert status == 200 and answer["input_tokens"] > chat["usage"]["prompt_tokens"]


CONVERSATIONS = [
    ({}, "[user]hi"),
    ({"system": "Be brief."}, "[system]Be brief.[user]hi"),
    ({"system": [TEXT, TEXT | {"cache_control": {"type": "ephemeral"}}]}, "[system]Say hi\nSay hi[user]hi"),
    (
        {
            "system": "A",
            "messages": [
                {"role": "system", "content": "B"},
                {"role": "user", "content": [TEXT, TEXT]},
                {"role": "system", "content": [TEXT]},
                {"role": "user", "content": "x"},
                {"role": "user", "content": "y"},
            ],
        },
        "[system]A\nB[user]Say hi\nSay hi[system]Say hi[user]x\ny",
    ),
    (
        {
            "messages": [
                {"role": "user", "content": "go"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "s"},
                        {"type": "redacted_thinking", "data": "AAAA"},
                        TEXT,
                        {"type": "tool_use", "id": "t1", "name": "read", "input": {"n": 4}},
                        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
                        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
                        {"type": "tool_use", "id": "t2", "name": "read", "input": {}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {"type": "tool_result", "tool_use_id": "t1", "content": "12"},
                        {"type": "tool_result", "tool_use_id": "t2", "content": [TEXT], "is_error": True},
                        {"type": "tool_result", "tool_use_id": "t3"},
                        TEXT,
                    ],
                },
            ]
        },
        '[user]go[assistant](hm)Say hit1:read{"n": 4}t2:read{}'
        "[tool]12@t1[tool]Error: Say hi@t2[tool]@t3[user]Say hi",
    ),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "document", "title": "T", "source": {"type": "text", "data": "D"}},
                        {"type": "document", "source": {"type": "content", "content": [TEXT]}},
                        {"type": "search_result", "title": "R", "source": "url", "content": [TEXT]},
                        {
                            "type": "tool_result",
                            "tool_use_id": "t",
                            "content": [{"type": "tool_reference", "tool_name": "read"}],
                        },
                    ],
                }
            ]
        },
        "[user]T\nD\nSay hi\nR\nurl\nSay hi[tool]read@t",
    ),
]


@pytest.mark.parametrize(("body", "prompt"), CONVERSATIONS)
def test_conversations_as_templates_read_them(body: dict[str, Any], prompt: str) -> None:
    async def read() -> None:
        async with running_daemon(template=TEMPLATE) as daemon:
            assert await prompt_of(daemon, body) == prompt

    in_loop(read)()


@in_loop
async def test_a_billing_header_never_reaches_the_prompt() -> None:
    """Claude Code's first system block differs in every request; the prefix must not."""
    async with running_daemon(template=TEMPLATE) as daemon:
        headers = [
            f"x-anthropic-billing-header: cc_version=2.1.{n}; cc_entrypoint=cli; cch={n};" for n in (1, 2)
        ]
        prompts = set()
        for header in headers:
            block = {"type": "text", "text": header}
            prompts.add(await prompt_of(daemon, {"system": [block, TEXT]}))
            prompts.add(await prompt_of(daemon, {"system": f"{header}\nSay hi"}))
            system = {"role": "system", "content": [block, TEXT]}
            prompts.add(await prompt_of(daemon, {"messages": [system, *HI["messages"]]}))
            assert await prompt_of(daemon, {"system": [block]}) == "[user]hi"
        assert prompts == {"[system]Say hi[user]hi"}
        quoted = {"messages": [{"role": "user", "content": headers[0]}]}
        assert headers[0] in await prompt_of(daemon, quoted)


@in_loop
async def test_tools_in_one_order_of_keys_and_without_those_of_the_server() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        others = [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
            {"type": "bash_20250124", "name": "bash"},
            {"type": "browser_toolset_20260801"},
        ]
        turned = dict(reversed(TOOL.items())) | {"type": "custom", "cache_control": {"type": "ephemeral"}}
        prompts = [await prompt_of(daemon, {"tools": [tool, *others]}) for tool in (TOOL, turned)]
        function = {"name": "read", "description": "Reads", "parameters": TOOL["input_schema"]}
        assert prompts == ["[user]hi" + json.dumps([{"type": "function", "function": function}])] * 2
        assert await prompt_of(daemon, {"tools": others}) == "[user]hi"


@in_loop
async def test_a_body_as_claude_code_sends_it() -> None:
    """Version 2.1.197."""
    async with running_daemon(template=TEMPLATE) as daemon:
        body = {
            "model": "tiny",
            "max_tokens": 32000,
            "stream": True,
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.77; cch=5ae3;"},
                TEXT | {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
            ],
            "messages": [
                {"role": "user", "content": [TEXT, TEXT | {"cache_control": {"type": "ephemeral"}}]},
                {"role": "system", "content": "Agents: none"},
            ],
            "tools": [TOOL | {"eager_input_streaming": True}],
            "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "temperature": 1,
        }
        headers = {
            "x-api-key": "k",
            "Authorization": "Bearer t",
            "anthropic-version": "2023-06-01",
            "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        }
        url = f"http://x{MESSAGES}?beta=true"
        async with daemon.session.post(url, json=body, headers=headers) as response:
            assert response.status == 200, await response.text()
            events = [line for line in (await response.text()).split("\n") if line.startswith("event: ")]
        order = list(dict.fromkeys(events))
        assert order == [
            f"event: {kind}"
            for kind in (
                "message_start",
                "content_block_start",
                "content_block_delta",
                "content_block_stop",
                "message_delta",
                "message_stop",
            )
        ]
        request = daemon.engine.seen[-1]
        assert request.sampling.temperature == 1.0
        prompt = daemon.service.models.entries[0].model.tokenizer.decode(request.prompt)
        assert prompt.startswith("[system]Say hi[user]Say hi\nSay hi[system]Agents: none[{")


@in_loop
async def test_an_answer_goes_on_with_what_the_client_began() -> None:
    async with running_daemon() as daemon:
        begun = [*HI["messages"], {"role": "assistant", "content": "It is"}]
        prompt = await prompt_of(daemon, {"messages": begun})
        assert prompt == "user\nhi\nassistant\nIt is"
        assert (await daemon.post(COUNT, {"messages": begun}))[1]["input_tokens"] == len(
            daemon.engine.seen[-1].prompt
        )
        called = {"messages": [*HI["messages"], CALL]}
    async with running_daemon(template=TEMPLATE) as daemon:
        assert (await daemon.post(COUNT, called))[0] == 200


SWITCHES = "{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }}"


@in_loop
async def test_whether_to_think_is_up_to_the_model_unless_told() -> None:
    async with running_daemon(template=SWITCHES) as daemon:
        for thinking, seen in (
            (None, ""),
            ({"type": "adaptive"}, ""),
            ({"type": "enabled", "budget_tokens": 1024}, "True"),
            ({"type": "between_tools"}, "True"),
            ({"type": "disabled"}, "False"),
        ):
            assert await prompt_of(daemon, {"thinking": thinking}) == f"hi {seen} "
        assert await prompt_of(daemon, {"output_config": {"effort": "low"}}) == "hi  low"


@in_loop
async def test_paths_with_and_without_version() -> None:
    async with running_daemon() as daemon:
        for prefix in ("", "/v1", "/v1/v1"):
            for path, body in (("/messages", HI), ("/messages/count_tokens", HI)):
                for end in ("", "/", "?beta=true", "/?beta=true"):
                    status, reply = await daemon.post(prefix + path + end, body)
                    assert status == 200, (prefix + path + end, reply)


@in_loop
async def test_sampling_and_ends() -> None:
    async with running_daemon() as daemon:
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7}
        status, _ = await daemon.post(MESSAGES, HI | sampling)
        assert status == 200
        seen = daemon.engine.seen[-1].sampling
        assert (seen.temperature, seen.top_p, seen.top_k, seen.max_tokens) == (0.5, 0.9, 7, 4)
        _, reply = await daemon.post(MESSAGES, HI)
        assert reply["stop_reason"] == "max_tokens"
        _, reply = await daemon.post(MESSAGES, HI | {"max_tokens": 0})
        assert (reply["stop_reason"], reply["content"], reply["usage"]["output_tokens"]) == (
            "max_tokens",
            [],
            0,
        )
        tokenizer = daemon.service.models.entries[0].model.tokenizer
        daemon.engine.script = lambda request: [*tokenizer.encode("one END two"), 513]
        long = HI | {"max_tokens": 100}
        _, reply = await daemon.post(MESSAGES, long)
        assert (reply["stop_reason"], reply["content"][0]["text"]) == ("end_turn", "one END two")
        _, reply = await daemon.post(MESSAGES, long | {"stop_sequences": ["x", "END", ""]})
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "END")
        assert reply["content"][0]["text"] == "one "


@in_loop
async def test_room_that_is_not_there_is_no_fault() -> None:
    """Claude Code asks for 32000 tokens, whatever the context."""
    async with running_daemon() as daemon:
        status, reply = await daemon.post(MESSAGES, HI | {"max_tokens": 32000})
        assert status == 200 and reply["stop_reason"] == "max_tokens"
        assert reply["usage"]["input_tokens"] + reply["usage"]["output_tokens"] == 512


def user(*blocks: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "read", "input": {}}]}
REFUSALS = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "tool"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (user(), "messages[0].content", "empty"),
    (user(IMAGE), "messages[0].content[0]", "image"),
    (user({"type": "audio"}), "messages[0].content[0]", "audio"),
    (user({"type": "text"}), "messages[0].content[0]", "text"),
    (user({"type": "text", "text": 5}), "messages[0].content[0]", "text"),
    (user({"type": "thinking", "thinking": "x"}), "messages[0].content[0]"),
    (user({"type": "tool_result", "tool_use_id": "t", "content": [IMAGE]}), "content[0].content[0]", "image"),
    (user({"type": "document", "source": {"type": "base64", "data": "x"}}), "content[0].source", "base64"),
    (user({"type": "document", "source": {"type": "url", "url": "x"}}), "content[0].source", "url"),
    ({"messages": [*HI["messages"], CALL]}, "messages", "results"),
    ({"messages": [{"role": "system", "content": "x-anthropic-billing-header: cch=1;"}]}, "messages"),
    ({"system": [IMAGE]}, "system[0]", "image"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "some"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "write"}}, "tool_choice", "write"),
    (
        {
            "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}],
            "tool_choice": {"type": "tool", "name": "web_search"},
        },
        "tool_choice",
        "web_search",
    ),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"compaction": {"type": "summary"}}, "compaction"),
]


@in_loop
async def test_what_cannot_be_served_is_refused_by_name() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        for body, *words in REFUSALS:
            await refused(daemon, body, *words)
        assert not any(engine.seen for engine in daemon.engines.started)


@in_loop
async def test_null_means_default_and_unknown_fields_are_ignored() -> None:
    async with running_daemon() as daemon:
        names = (
            "system stream temperature top_p top_k stop_sequences tools tool_choice thinking output_config "
            "output_format cache_control thread compaction metadata service_tier container mcp_servers"
        )
        body = HI | dict.fromkeys(names.split()) | {"no_such_field": {"a": 1}}
        status, reply = await daemon.post(MESSAGES, body)
        assert status == 200, reply
        await daemon.post(MESSAGES, HI)
        first, second = daemon.engine.seen
        assert (first.prompt, first.sampling) == (second.prompt, second.sampling)


@in_loop
async def test_overflow_has_the_words_and_numbers_that_make_a_client_compact() -> None:
    async with running_daemon() as daemon:
        body = HI | {"messages": [{"role": "user", "content": "x " * 600}]}
        number = (await daemon.post(COUNT, body))[1]["input_tokens"]
        await refused(daemon, body, f"prompt is too long: {number} tokens > 511 maximum", "512")


@in_loop
async def test_errors_are_anthropics_for_who_speaks_it() -> None:
    async with running_daemon() as daemon:
        for path in (MESSAGES, COUNT):
            async with daemon.session.post(f"http://x{path}", json=HI | {"model": "nosuch"}) as response:
                answer = await response.json()
                assert (response.status, answer["error"]["type"]) == (404, "not_found_error")
                assert response.headers["request-id"] == answer["request_id"]
        version = {"anthropic-version": "2023-06-01"}
        for path in ("/v1/nothing", "/v1/models/nosuch", "/v1/chat/completions"):
            async with daemon.session.get(f"http://x{path}", headers=version) as response:
                assert response.status in (404, 405) and (await response.json())["type"] == "error"
        async with daemon.session.get("http://x/v1/models/nosuch") as response:
            assert "type" not in await response.json()
