"""Ollama's replies in the shapes of its documentation, and as its clients' own parsers want them."""

from __future__ import annotations

import datetime
from typing import Any, Literal

import msgspec
import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon
from fake_models import CHATML, QWEN_INFILL, chat_tokenizer
from test_ollama import CHAT, GENERATE, HI, lines
from test_ollama_models import configure

# Keys and types of each documented reply (ollama/ollama, docs/api.md). A list has a shape of its elements.
_PART = {"model": str, "created_at": str, "done": bool}
_COUNTS = dict.fromkeys(
    (
        *("total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration"),
        *("eval_count", "eval_duration"),
    ),
    int,
)
_MESSAGE = {"message": {"role": str, "content": str}}
_DETAILS = {
    "details": {
        **dict.fromkeys(("parent_model", "format", "family", "parameter_size", "quantization_level"), str),
        "families": [str],
    }
}
_LISTED = {"name": str, "model": str, "digest": str, "size": int, **_DETAILS}
SHAPES: dict[str, Any] = {
    "chat line": _PART | _MESSAGE,
    "chat end": _PART | _MESSAGE | _COUNTS | {"done_reason": str},
    "generate line": _PART | {"response": str},
    "generate end": _PART | {"response": str, "context": [int], "done_reason": str} | _COUNTS,
    "chat load": _PART | _MESSAGE | {"done_reason": str},
    "generate load": _PART | {"response": str, "done_reason": str},
    "tags": {"models": [_LISTED | {"modified_at": str}]},
    "ps": {"models": [_LISTED | {"expires_at": str, "size_vram": int, "context_length": int}]},
    "show": {
        **dict.fromkeys(("modelfile", "parameters", "template", "license", "system", "modified_at"), str),
        "model_info": {
            "general.architecture": str,
            "general.parameter_count": int,
            "llama.context_length": int,
        },
        "capabilities": [str],
        **_DETAILS,
    },
    "embed": {
        "model": str,
        "embeddings": [[float]],
        **dict.fromkeys(("total_duration", "load_duration", "prompt_eval_count"), int),
    },
    "embeddings": {"embedding": [float]},
    "version": {"version": str},
}


def assert_shape(value: Any, shape: Any, where: str) -> None:
    """Whether the value has at least the keys, and their types."""
    if isinstance(shape, dict):
        assert isinstance(value, dict) and not shape.keys() - value.keys(), where
        for key, inner in shape.items():
            assert_shape(value[key], inner, f"{where}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list) and value, where
        for item in value:
            assert_shape(item, shape[0], f"{where}[]")
    else:
        assert type(value) is shape, f"{where}: {value!r}"


@in_loop
async def test_documented_shapes() -> None:
    async with running_daemon() as daemon:
        configure(daemon)
        chat, generate = {"model": "tiny", "messages": HI}, {"model": "tiny", "prompt": "hi"}
        *chat_lines, chat_end = await lines(daemon, CHAT, chat)
        *generate_lines, generate_end = await lines(daemon, GENERATE, generate)
        found = {
            "chat end": chat_end,
            "generate end": generate_end,
            "chat load": (await daemon.post(CHAT, {"model": "tiny"}))[1],
            "generate load": (await daemon.post(GENERATE, {"model": "tiny"}))[1],
            "tags": (await daemon.get("/api/tags"))[1],
            "ps": (await daemon.get("/api/ps"))[1],
            "show": (await daemon.post("/api/show", {"model": "tiny"}))[1],
            "embed": (await daemon.post("/api/embed", {"model": "tiny", "input": "a"}))[1],
            "embeddings": (await daemon.post("/api/embeddings", {"model": "tiny", "prompt": "a"}))[1],
            "version": (await daemon.get("/api/version"))[1],
        }
        for name, replies in (("chat line", chat_lines), ("generate line", generate_lines)):
            for reply in replies:
                assert_shape(reply, SHAPES[name], name)
        for name, reply in found.items():
            assert_shape(reply, SHAPES[name], name)
        whole = (await daemon.post(CHAT, chat | {"stream": False}))[1]
        assert_shape(whole, SHAPES["chat end"], "whole chat")
        assert_shape(
            (await daemon.post(GENERATE, generate | {"stream": False}))[1], SHAPES["generate end"], ""
        )


class ZedDetails(msgspec.Struct):
    format: str
    family: str
    parameter_size: str
    quantization_level: str
    families: list[str] | None


class ZedListing(msgspec.Struct):
    name: str
    modified_at: str
    size: int
    digest: str
    details: ZedDetails


class ZedFunction(msgspec.Struct):
    name: str
    arguments: Any


class ZedCall(msgspec.Struct):
    id: str
    function: ZedFunction


class ZedMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str
    tool_calls: list[ZedCall] | None = None
    thinking: str | None = None


class ZedDelta(msgspec.Struct):
    model: str
    created_at: str
    message: ZedMessage
    done: bool
    done_reason: str | None = None
    prompt_eval_count: int | None = None
    eval_count: int | None = None


@in_loop
async def test_zed_parses_lists_and_every_line() -> None:
    said = [*chat_tokenizer().encode('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>').ids, 513]
    async with running_daemon(lambda _: said, CHATML + "{{ tools }}<tool_call>") as daemon:
        _, reply = await daemon.get("/api/tags")
        assert msgspec.convert(reply["models"], list[ZedListing])[0].name == "tiny:latest"
        body = {
            "model": "tiny:latest",
            "messages": HI,
            "stream": True,
            "keep_alive": -1,
            "options": {"num_ctx": 4096, "stop": [], "temperature": 1.0},
            "tools": [{"type": "function", "function": {"name": "f", "description": None, "parameters": {}}}],
            "think": None,
        }
        deltas = msgspec.convert(await lines(daemon, CHAT, body), list[ZedDelta])
        # It takes one call of each line.
        assert [len(delta.message.tool_calls or []) for delta in deltas] == [0] * (len(deltas) - 1) + [1]


@in_loop
async def test_open_webui_reads_the_time_of_expiry() -> None:
    async with running_daemon() as daemon:
        for stay in (300, -1):
            await daemon.post(GENERATE, {"model": "tiny", "keep_alive": stay})
            _, reply = await daemon.get("/api/ps")
            (model,) = reply["models"]
            assert datetime.datetime.fromisoformat(model["expires_at"]) > datetime.datetime.now(datetime.UTC)
            assert model["model"] == model["name"]


@in_loop
async def test_copilot_finds_the_context_and_then_speaks_openai() -> None:
    async with running_daemon() as daemon:
        configure(daemon)
        _, listed = await daemon.get("/api/tags")
        name = listed["models"][0]["model"]
        _, shown = await daemon.post("/api/show", {"model": name})
        info = shown["model_info"]
        assert "tools" in shown["capabilities"] and info["general.basename"] == name
        assert info[f"{info['general.architecture']}.context_length"] == 8192
        assert info[f"{shown['details']['family']}.context_length"] == 8192  # as codecompanion looks it up
        status, reply = await daemon.post("/v1/chat/completions", {"model": name, "messages": HI})
        assert status == 200 and reply["model"] == "tiny"


@in_loop
async def test_continue_completes_at_the_end_of_a_file() -> None:
    async with running_daemon(tokens=QWEN_INFILL) as daemon:
        assert ".Suffix" in (await daemon.post("/api/show", {"name": "tiny"}))[1]["template"]
        body = {
            "model": "tiny",
            "prompt": "def f():\n",
            "suffix": "",
            "options": {"num_predict": 4, "num_ctx": 8192, "stop": ["<|im_end|>"]},
            "keep_alive": 1800,
            "stream": True,
        }
        told = await lines(daemon, GENERATE, body)
        assert all("error" not in line and isinstance(line["response"], str) for line in told)
        assert daemon.engine.seen[0].prompt[0] == 514


@in_loop
async def test_a_tool_loop_as_gptel_plays_it() -> None:
    """Calls of several lines become messages of their own, and results come without ids."""
    async with running_daemon(template=CHATML + "{{ tools }}<tool_call>") as daemon:
        call = {"function": {"name": "look", "arguments": {"at": "a"}}}
        messages = [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "one"},
            {"role": "tool", "content": "two"},
        ]
        tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
        body = {"model": "tiny", "messages": messages, "tools": tools, "options": {"num_predict": 1}}
        assert (await lines(daemon, CHAT, body))[-1]["done"]
        prompt = daemon.service.models.entries[0].model.tokenizer.decode(daemon.engine.seen[0].prompt)
        assert prompt.index("one") < prompt.index("two") and prompt.count("look") >= 3


async def talk_as(daemon: Daemon, **options: object) -> dict[str, Any]:
    body = {"model": "tiny", "messages": HI, "options": options}
    return (await lines(daemon, CHAT, body))[-1]


@pytest.mark.parametrize("num_ctx", [32768, 20480, 8192, 4096])
def test_contexts_that_clients_ask_for_whatever_the_model(num_ctx: int) -> None:
    async def talk() -> None:
        async with running_daemon() as daemon:
            last = await talk_as(daemon, num_ctx=num_ctx)
            assert last["prompt_eval_count"] + last["eval_count"] == 512

    in_loop(talk)()
