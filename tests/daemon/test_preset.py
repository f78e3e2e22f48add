"""What a model that was made from another brings to every request, on every surface."""

from __future__ import annotations

from pathlib import Path

import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon

from quantd.daemon.preset import PRESET_NAME, Preset
from quantd.quant.errors import CheckpointError

PRESET = Preset(
    system="Be brief.",
    messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    sampling={"temperature": 0.1, "seed": 7},
    stop=["zz"],
    context_len=100,
    max_tokens=3,
)


def test_a_preset_is_read_as_written(tmp_path: Path) -> None:
    assert Preset.read(tmp_path) == Preset()
    PRESET.write(tmp_path)
    assert Preset.read(tmp_path) == PRESET
    Preset().write(tmp_path)
    assert not (tmp_path / PRESET_NAME).exists()
    (tmp_path / PRESET_NAME).write_text('{"stop": 3}')
    with pytest.raises(CheckpointError, match=r"preset\.json"):
        Preset.read(tmp_path)


def test_one_preset_over_another() -> None:
    over = Preset(system="Be long.", sampling={"temperature": 0.9}, context_len=50).over(PRESET)
    assert over.system == "Be long." and over.context_len == 50
    assert over.sampling == {"temperature": 0.9, "seed": 7}
    assert (over.messages, over.stop, over.max_tokens) == (PRESET.messages, ["zz"], 3)
    assert Preset().over(PRESET) == PRESET == PRESET.over(Preset())


async def prompt_of(daemon: Daemon, messages: list[dict[str, str]], **fields: object) -> str:
    status, reply = await daemon.post("/v1/chat/completions", {"messages": messages} | fields)
    assert status == 200, reply
    tokenizer = daemon.service.models.entries[0].model.tokenizer
    return tokenizer.decode(daemon.engine.seen[-1].prompt)


@in_loop
async def test_messages_of_the_model_stand_first() -> None:
    async with running_daemon() as daemon:
        PRESET.write(daemon.store.get("tiny").path)
        text = await prompt_of(daemon, [{"role": "user", "content": "hi"}])
        assert text == "system\nBe brief.\nuser\na\nassistant\nb\nuser\nhi\nassistant\n"
        assert daemon.engine.seen[-1].sampling.temperature == 0.1
        assert daemon.engine.seen[-1].sampling.seed == 7
        assert daemon.engine.seen[-1].sampling.max_tokens == 3


@in_loop
async def test_what_a_request_says_counts_more() -> None:
    async with running_daemon() as daemon:
        Preset(system="Be brief.", sampling={"temperature": 0.1}, max_tokens=3).write(
            daemon.store.get("tiny").path
        )
        messages = [{"role": "system", "content": "x"}, {"role": "user", "content": "hi"}]
        text = await prompt_of(daemon, messages, temperature=0.5, max_tokens=2)
        assert text == "system\nx\nuser\nhi\nassistant\n"
        sampling = daemon.engine.seen[-1].sampling
        assert (sampling.temperature, sampling.max_tokens) == (0.5, 2)
        assert (sampling.top_p, sampling.min_p) == (0.95, 0.05)


@in_loop
async def test_the_context_and_the_stop_strings_of_the_model() -> None:
    async with running_daemon() as daemon:
        Preset(context_len=20, stop=["b"]).write(daemon.store.get("tiny").path)
        status, reply = await daemon.post("/v1/completions", {"prompt": [40] * 20})
        assert status == 400 and "20 tokens" in reply["error"]["message"]
        _, reply = await daemon.post("/v1/completions", {"prompt": "abc", "max_tokens": 9})
        assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("a", "stop")
        _, reply = await daemon.post("/v1/completions", {"prompt": "abc", "max_tokens": 9, "stop": "c"})
        assert reply["choices"][0]["text"] == "ab"
