"""Whole exchanges of each dialect, as bytes on the wire, against golden transcripts and openapi.json.

`PYTHONPATH=tests python tests/daemon/test_transcripts.py` writes them anew, to be read as a diff.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from agent_engine import TEMPLATE, be_an_agent, say
from daemon_in_loop import Daemon, in_loop, running_daemon
from fake_models import QWEN_INFILL
from test_openapi import closed

FOLDER = Path(__file__).parents[1] / "data" / "golden" / "transcripts"
ASKED = [{"role": "user", "content": "How is gauge 4?"}]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FUNCTION = {"name": "read_gauge", "description": "Reads a gauge.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS = [{"type": "function", **FUNCTION}]
ANTHROPIC_TOOLS = [{"name": "read_gauge", "description": "Reads a gauge.", "input_schema": SCHEMA}]
PLAIN = "It is 12 bar."

# By name: the path, the body, and what the engine says; None: as an agent's model does.
EXCHANGES: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "openai_chat": (
        "/v1/chat/completions",
        {"messages": ASKED, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}},
        None,
    ),
    "openai_chat_whole": ("/v1/chat/completions", {"messages": ASKED, "tools": TOOLS}, None),
    "openai_completion": (
        "/v1/completions",
        {"prompt": "How", "stream": True, "logprobs": 1, "echo": True},
        "ly",
    ),
    "openai_embeddings": ("/v1/embeddings", {"input": ["a", "b"]}, ""),
    "responses": ("/v1/responses", {"input": ASKED, "tools": FLAT_TOOLS, "stream": True}, None),
    "responses_whole": ("/v1/responses", {"input": "How is gauge 4?"}, PLAIN),
    "anthropic": (
        "/v1/messages",
        {"messages": ASKED, "tools": ANTHROPIC_TOOLS, "max_tokens": 200, "stream": True},
        None,
    ),
    "anthropic_whole": (
        "/v1/messages",
        {"messages": ASKED, "max_tokens": 100, "stop_sequences": ["bar"]},
        PLAIN,
    ),
    "ollama_chat": ("/api/chat", {"messages": ASKED, "tools": TOOLS}, None),
    "ollama_chat_whole": ("/api/chat", {"messages": ASKED, "stream": False, "think": False}, PLAIN),
    "ollama_generate": ("/api/generate", {"prompt": "How is gauge 4?"}, "<think>So.</think>It is."),
    "ollama_insert": ("/api/generate", {"prompt": "a = ", "suffix": "\n", "stream": False}, "1"),
    "llama_server_completion": (
        "/completion",
        {"prompt": "How", "stream": True, "n_probs": 1, "return_progress": True, "seed": 7},
        "ly",
    ),
    "llama_server_infill": (
        "/infill",
        {
            "input_prefix": "a = ",
            "input_suffix": "\n",
            "input_extra": [{"filename": "b.py", "text": "b = 2\n"}],
            "seed": 7,
        },
        "1",
    ),
    "llama_server_infill_stream": (
        "/infill",
        {"input_prefix": "a = ", "input_suffix": "\n", "stream": True, "seed": 7},
        "1",
    ),
    "overflow": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 600}]}, ""),
}

# What differs from one time to the next, and what stands there instead.
CHANGING = (
    (r"[0-9a-f]{32}", "ID"),
    (r"call_[0-9a-f]{24}", "call_ID"),
    (r'("(?:created|created_at|completed_at)":)(?:\d+|"[^"]*")', r"\1TIME"),
    (r'("\w+_duration":)\d+', r"\1NANOSECONDS"),
    (r'("\w+_(?:ms|per_second)":)[\d.e-]+', r"\1NUMBER"),
)


def settled(text: str) -> str:
    for pattern, stands_there in CHANGING:
        text = re.sub(pattern, stands_there, text)
    return text


@dataclass(frozen=True)
class Answer:
    status: int
    content_type: str
    text: str

    def objects(self) -> Iterator[Any]:
        """What it holds: one object, or those of events or lines."""
        kind = self.content_type.partition(";")[0]
        if kind == "application/json":
            yield json.loads(self.text)
        elif kind == "application/x-ndjson":
            yield from map(json.loads, self.text.splitlines())
        else:
            data = re.findall(r"^data: (\{.*)$", self.text, re.MULTILINE)
            assert data and kind == "text/event-stream"
            yield from map(json.loads, data)


async def answered(daemon: Daemon, name: str) -> Answer:
    path, body, answer = EXCHANGES[name]
    be_an_agent(daemon) if answer is None else say(daemon, answer)
    async with daemon.session.post(f"http://x{path}", json={"model": "tiny"} | body) as response:
        text = (await response.read()).decode()
        return Answer(response.status, response.headers["Content-Type"], text)


def transcript(name: str, answer: Answer) -> str:
    """A request and all of its answer."""
    path, body, _ = EXCHANGES[name]
    asked = f"POST {path}\n{json.dumps({'model': 'tiny'} | body, indent=1)}\n"
    return settled(f"{asked}\n{answer.status} {answer.content_type}\n{answer.text}")


def described(document: dict[str, Any], name: str, answer: Answer) -> dict[str, Any]:
    """The schema of each object that an answer holds."""
    kind = answer.content_type.partition(";")[0]
    responses = document["paths"][EXCHANGES[name][0]]["post"]["responses"]
    schema = responses[str(answer.status)]["content"][kind]["schema"]
    if kind == "application/x-ndjson":
        schema = schema["items"]
    elif kind == "text/event-stream":
        data = schema["properties"]["data"]
        schema = data.get("anyOf", [data])[-1]["contentSchema"]
    return schema | {"components": document["components"]}


@in_loop
async def write_all() -> None:
    async with running_daemon(template=TEMPLATE, tokens=QWEN_INFILL) as daemon:
        await daemon.service.load("tiny")
        for name in EXCHANGES:
            (FOLDER / f"{name}.txt").write_text(transcript(name, await answered(daemon, name)))


@pytest.mark.parametrize("name", EXCHANGES)
def test_transcript(name: str) -> None:
    async def check() -> None:
        async with running_daemon(template=TEMPLATE, tokens=QWEN_INFILL) as daemon:
            await daemon.service.load("tiny")
            answer = await answered(daemon, name)
            assert transcript(name, answer) == (FOLDER / f"{name}.txt").read_text()
            _, document = await daemon.get("/openapi.json")
            schema = described(closed(document), name, answer)
            for value in answer.objects():
                jsonschema.validate(value, schema)

    in_loop(check)()


def test_every_transcript_is_checked() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == EXCHANGES.keys()


if __name__ == "__main__":
    write_all()
