"""Gaps filled over OpenAI's and Mistral's paths, by clients that send a prompt and a suffix."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon
from fake_models import QWEN_INFILL
from test_openai import chunks_of, texts_of
from test_openai_sdk import async_client

COMPLETIONS = "/v1/completions"
FIM = "/v1/fim/completions"
GAP = {"model": "tiny", "prompt": "def f(", "suffix": "return a\n", "max_tokens": 6}
LAYOUT = "<|fim_prefix|>{prompt}<|fim_suffix|>{suffix}<|fim_middle|>"


def prompt_text(daemon: Daemon) -> str:
    tokenizer = daemon.service.models.entries[0].model.tokenizer
    return tokenizer.decode(daemon.engine.seen[-1].prompt, special=True)


@pytest.mark.parametrize("path", [COMPLETIONS, FIM, "/fim/completions"])
@pytest.mark.parametrize("suffix", ["return a\n", ""])
def test_a_suffix_makes_a_gap(path: str, suffix: str) -> None:
    async def fill() -> None:
        async with running_daemon(tokens=QWEN_INFILL) as daemon:
            status, reply = await daemon.post(path, GAP | {"suffix": suffix})
            assert status == 200
            assert prompt_text(daemon) == LAYOUT.format(prompt="def f(", suffix=suffix)
            assert reply["usage"]["prompt_tokens"] == len(daemon.engine.seen[0].prompt)
            assert daemon.engine.seen[0].urgent
            choice = reply["choices"][0]
            text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert text and choice["finish_reason"] == "length"
            streamed = chunks_of(await daemon.stream(path, GAP | {"suffix": suffix, "stream": True}))
            assert texts_of(streamed)[0] == text

    in_loop(fill)()


@in_loop
async def test_each_control_token_ends_an_answer() -> None:
    async with running_daemon(tokens=QWEN_INFILL) as daemon:
        for end in (514, 515, 518, 519, 520, 513):
            daemon.engines.script = lambda request, end=end: [40, 41, end, 42]
            for engine in daemon.engines.started:
                engine.script = daemon.engines.script
            _, reply = await daemon.post(COMPLETIONS, GAP | {"max_tokens": 50})
            assert reply["choices"][0]["finish_reason"] == "stop"
            assert reply["usage"]["completion_tokens"] == 3
        await daemon.post(COMPLETIONS, GAP | {"ignore_eos": True})
        assert daemon.engine.seen[-1].sampling.stop_token_ids == ()


@in_loop
async def test_mistrals_defaults() -> None:
    async with running_daemon(tokens=QWEN_INFILL) as daemon:
        body = {"model": "tiny", "prompt": "x", "random_seed": 7, "stop": ["zz"]}
        assert (await daemon.post(FIM, body))[0] == 200
        sampling = daemon.engine.seen[0].sampling
        assert sampling.seed == 7 and sampling.max_tokens is None
        assert prompt_text(daemon) == LAYOUT.format(prompt="x", suffix="")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"echo": True}, "echo"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [40, 41]}, "prompt"),
        ({"suffix": 3}, "suffix"),
    ],
)
def test_what_makes_no_gap_is_refused(body: dict[str, Any], param: str) -> None:
    async def refuse() -> None:
        async with running_daemon(tokens=QWEN_INFILL) as daemon:
            status, reply = await daemon.post(COMPLETIONS, GAP | body)
            assert status == 400 and reply["error"]["param"] == param

    in_loop(refuse)()


@in_loop
async def test_a_model_that_has_not_learnt_it_is_named() -> None:
    async with running_daemon() as daemon:
        for path in (COMPLETIONS, FIM):
            for suffix in ("x", ""):
                status, reply = await daemon.post(path, GAP | {"suffix": suffix})
                assert status == 400 and reply["error"]["param"] == "suffix"
                assert "tiny" in reply["error"]["message"]
        assert not daemon.engine.seen
        assert (await daemon.post(COMPLETIONS, GAP | {"suffix": None}))[0] == 200


@in_loop
async def test_a_gap_that_does_not_fit_is_told_with_both_numbers() -> None:
    async with running_daemon(tokens=QWEN_INFILL) as daemon:
        status, reply = await daemon.post(COMPLETIONS, GAP | {"prompt": "a b " * 400})
        assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
        assert reply["error"]["n_ctx"] == 512 and reply["error"]["n_prompt_tokens"] > 512
        assert reply["error"]["param"] == "prompt"


@in_loop
async def test_the_sdk_fills_gaps() -> None:
    async with running_daemon(tokens=QWEN_INFILL) as daemon, async_client(daemon, "tcp") as client:
        whole = await client.completions.create(**GAP, n=2, logprobs=1)
        assert len(whole.choices) == 2 and whole.choices[0].logprobs is not None
        stream = await client.completions.create(**GAP, stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        assert text == whole.choices[0].text
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(**GAP | {"prompt": [40]})
