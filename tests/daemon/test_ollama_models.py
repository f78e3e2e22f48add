"""What Ollama's surface tells of models on disk and in memory, with all that clients look for in it."""

from __future__ import annotations

import datetime
import json
import os
import re
from typing import Any

import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon
from fake_models import CHATML, QWEN_INFILL

from quantd.daemon.preset import Preset
from quantd.daemon.wire import ollama_models

TOOLS_AND_THINKING = CHATML + "{% if tools %}{{ tools }}{% endif %}{% if enable_thinking %}<think>{% endif %}"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}


def configure(daemon: Daemon, **config: object) -> None:
    folder = daemon.store.get("tiny").path
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    os.utime(folder)


async def shown(daemon: Daemon, name: str = "tiny") -> dict[str, Any]:
    status, reply = await daemon.post("/api/show", {"model": name})
    assert status == 200, reply
    return reply


async def listed(daemon: Daemon, path: str = "/api/tags") -> dict[str, Any]:
    """The only model of a list."""
    status, reply = await daemon.get(path)
    assert status == 200
    (model,) = reply["models"]
    return model


@in_loop
async def test_a_list_has_every_field_that_strict_clients_want() -> None:
    async with running_daemon() as daemon:
        configure(daemon)
        model = await listed(daemon)
        assert model["name"] == model["model"] == "tiny:latest"
        assert model["size"] == 1000 and re.fullmatch("[0-9a-f]{64}", model["digest"])
        assert datetime.datetime.fromisoformat(model["modified_at"]).timestamp() == 1700000000.5
        assert model["details"] == {
            "parent_model": "",
            "format": "gguf",
            "family": "llama",
            "families": ["llama"],
            "parameter_size": "134.5M",
            "quantization_level": "Q8_0",
        }
        assert model["capabilities"] == ["completion", "tools"]


@in_loop
async def test_the_context_is_the_one_that_is_served() -> None:
    async with running_daemon() as daemon:
        configure(daemon)
        info = (await shown(daemon))["model_info"]
        assert info["general.architecture"] == "llama" and info["llama.context_length"] == 8192
        assert (await daemon.get("/v1/models/tiny"))[1]["max_model_len"] == 8192
        assert info["general.parameter_count"] == 134_515_008 and info["llama.embedding_length"] == 576
        await daemon.service.load("tiny")
        running = await listed(daemon, "/api/ps")
        reply = await shown(daemon)
        _, models = await daemon.get("/v1/models")
        lengths = {
            running["context_length"],
            reply["model_info"]["llama.context_length"],
            models["data"][0]["max_model_len"],
            daemon.engine.info.max_request_len,
        }
        assert len(lengths) == 1
        assert f"num_ctx{' ' * 24}{lengths.pop()}" in reply["parameters"].splitlines()


@in_loop
async def test_what_runs_and_until_when() -> None:
    async with running_daemon() as daemon:
        assert await daemon.get("/api/ps") == (200, {"models": []})
        await daemon.service.load("tiny", 600)
        model = await listed(daemon, "/api/ps")
        info = daemon.engine.info
        assert model["size"] == info.weight_bytes + info.kv_bytes and model["size_vram"] == 0
        left = datetime.datetime.fromisoformat(model["expires_at"]) - datetime.datetime.now(datetime.UTC)
        assert 590 < left.total_seconds() <= 600
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}[+-]\d\d:\d\d", model["expires_at"])
        await daemon.service.load("tiny", float("inf"))
        forever = (await listed(daemon, "/api/ps"))["expires_at"]
        assert datetime.datetime.fromisoformat(forever).year > 2200
        assert (await listed(daemon))["digest"] == model["digest"]


@pytest.mark.parametrize(
    ("template", "tokens", "capabilities"),
    [
        (CHATML, (), ["completion", "tools"]),
        (None, (), ["completion"]),
        (CHATML, QWEN_INFILL, ["completion", "tools", "insert"]),
        (TOOLS_AND_THINKING, (), ["completion", "tools", "thinking"]),
        (TOOLS_AND_THINKING, QWEN_INFILL, ["completion", "tools", "insert", "thinking"]),
    ],
)
def test_capabilities(template: str | None, tokens: tuple[str, ...], capabilities: list[str]) -> None:
    async def look() -> None:
        async with running_daemon(template=template, tokens=tokens) as daemon:
            reply = await shown(daemon)
            assert reply["capabilities"] == capabilities == (await listed(daemon))["capabilities"]
            assert (".Suffix" in reply["template"]) == ("insert" in capabilities)  # as Continue looks for it
            await daemon.service.load("tiny")
            assert (await shown(daemon))["capabilities"] == capabilities

    in_loop(look)()


@in_loop
async def test_a_model_made_for_embeddings_says_so() -> None:
    async with running_daemon() as daemon:
        (daemon.store.get("tiny").path / "modules.json").write_text("[]")
        assert (await shown(daemon))["capabilities"] == ["embedding"]


@in_loop
async def test_parameters_as_continue_reads_them() -> None:
    async with running_daemon() as daemon:
        folder = daemon.store.get("tiny").path
        text = (await shown(daemon))["parameters"]
        lines = [re.fullmatch(r"(\S+)\s+(\".*\"|\S+)", line) for line in text.splitlines()]
        pairs = [(line[1], json.loads(line[2])) for line in lines if line]
        assert len(pairs) == len(lines) and pairs == [("stop", "</s>"), ("stop", "<|im_end|>")]
        Preset(sampling={"temperature": 0.5, "repetition_penalty": 1.1}, stop=['"é'], max_tokens=9).write(
            folder
        )
        lines = (await shown(daemon))["parameters"].splitlines()
        assert [line.split() for line in lines] == [
            ["temperature", "0.5"],
            ["repeat_penalty", "1.1"],
            ["num_predict", "9"],
            ["stop", '"\\"é"'],
        ]


@in_loop
async def test_system_messages_and_license_of_a_model_of_ones_own() -> None:
    async with running_daemon() as daemon:
        messages = [{"role": "user", "content": "a"}]
        Preset(system="Be brief.", messages=messages, license="MIT", context_len=128).write(
            daemon.store.get("tiny").path
        )
        reply = await shown(daemon)
        assert (reply["system"], reply["messages"], reply["license"]) == ("Be brief.", messages, "MIT")
        assert (
            'SYSTEM """Be brief."""' in reply["modelfile"] and "PARAMETER num_ctx 128" in reply["modelfile"]
        )
        assert reply["model_info"]["llama.context_length"] == 128
        await daemon.service.load("tiny")
        assert (await listed(daemon, "/api/ps"))["context_length"] == 128


@in_loop
async def test_names_as_clients_write_them() -> None:
    async with running_daemon() as daemon:
        for name in ("tiny", "tiny:latest", "library/tiny"):
            assert (await shown(daemon, name))["model_info"]["general.basename"] == name
        assert (await daemon.post("/api/show", {"name": "tiny"}))[0] == 200
        status, reply = await daemon.post("/api/show", {"model": "tiny:7b"})
        assert status == 404 and "'tiny:7b'" in reply["error"]
        assert await daemon.post("/api/show", {}) == (400, {"error": "model is required"})


@in_loop
async def test_files_are_read_once_and_again_when_they_change() -> None:
    async with running_daemon() as daemon:
        before = await shown(daemon)
        tokenizer = daemon.store.get("tiny").path / "tokenizer.json"
        stamp = tokenizer.parent.stat().st_mtime_ns
        kept = tokenizer.read_bytes()
        tokenizer.write_bytes(b"{}")
        os.utime(tokenizer.parent, ns=(stamp, stamp))
        assert await shown(daemon) == before
        tokenizer.write_bytes(kept)
        (tokenizer.parent / "chat_template.jinja").write_text(TOOLS_AND_THINKING)
        os.utime(tokenizer.parent)
        assert (await shown(daemon))["capabilities"] == ["completion", "tools", "thinking"]


@pytest.mark.parametrize(
    ("description", "level"),
    [
        ("gguf Q4_K", "Q4_K"),
        ("gguf", "unknown"),
        ("bf16 weights", "BF16"),
        ("fp32 weights", "F32"),
        ("gptq 4-bit g32 act-order", "gptq 4-bit g32 act-order"),
    ],
)
def test_quantization_levels(description: str, level: str) -> None:
    assert ollama_models._quantization(description) == level


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, ""), (12, "12"), (1_500, "1.5K"), (134_515_008, "134.5M"), (8_030_261_248, "8.0B")],
)
def test_counts(count: int, text: str) -> None:
    assert ollama_models._count(count) == text
