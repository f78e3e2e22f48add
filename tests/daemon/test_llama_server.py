"""llama-server's surface as its README tells it, and as llama.vim and llama.vscode ask it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from daemon_in_loop import Daemon, case, in_loop, running_daemon
from fake_models import CHATML, QWEN_INFILL, chat_tokenizer
from scripted_engine import Script
from waiting import until_so

from quantd.daemon.text import REPLACEMENT

TOKENIZER = chat_tokenizer()
# llama.vim's request at the cursor (autoload/llama.vim, s:fim).
VIM = {
    "id_slot": 0,
    "input_prefix": "def f(a):\n",
    "input_suffix": "\n\nf(1)\n",
    "input_extra": [{"text": "one = 1\n", "time": [1, 2], "filename": "a.py"}],
    "prompt": "    return ",
    "n_predict": 8,
    "stop": ["\n\n"],
    "n_indent": 4,
    "top_k": 40,
    "top_p": 0.90,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 10_000,
    "response_fields": [
        "content",
        "timings/prompt_n",
        "timings/prompt_ms",
        "timings/prompt_per_token_ms",
        "timings/prompt_per_second",
        "timings/predicted_n",
        "timings/predicted_ms",
        "timings/predicted_per_token_ms",
        "timings/predicted_per_second",
        "truncated",
        "tokens_cached",
    ],
}
# And the one that has its ring of chunks computed ahead (s:ring_update).
VIM_WARM_UP = {
    "input_prefix": "",
    "input_suffix": "",
    "input_extra": VIM["input_extra"],
    "prompt": "",
    "n_predict": 0,
    "temperature": 0.0,
    "stream": False,
    "samplers": [],
    "cache_prompt": True,
    "t_max_prompt_ms": 1,
    "t_max_predict_ms": 1,
    "response_fields": [""],
}
# llama.vscode's (src/llama-server.ts, createRequestPayload).
VSCODE = {
    "input_prefix": "def f(a):\n",
    "input_suffix": "\n",
    "input_extra": [],
    "prompt": "    ",
    "n_predict": 8,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "n_indent": 4,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 2500,
}
COMPLETION_KEYS = {
    "index",
    "content",
    "tokens",
    "id_slot",
    "stop",
    "model",
    "tokens_predicted",
    "tokens_evaluated",
    "generation_settings",
    "prompt",
    "has_new_line",
    "truncated",
    "stop_type",
    "stopping_word",
    "tokens_cached",
    "timings",
}


def says(text: str) -> Script:
    """A script that says a text and ends."""
    ids = TOKENIZER.encode(text).ids
    return lambda request: [*ids, 2]


def events_of(stream: str) -> list[Any]:
    frames = [frame for frame in stream.split("\n\n") if frame and not frame.startswith(":")]
    assert all(frame.startswith("data: ") for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


async def refused(daemon: Daemon, path: str, body: object, status: int = 400) -> dict[str, Any]:
    """The error of an answer in llama-server's shape."""
    found, reply = await daemon.post(path, body)
    assert found == status, reply
    error = reply["error"]
    assert error["code"] == status and isinstance(error["message"], str)
    return error


@in_loop
async def test_a_completion_has_the_fields_of_the_readme() -> None:
    async with running_daemon(says("one\ntwo")) as daemon:
        status, reply = await daemon.post("/completion", {"prompt": "Say", "return_tokens": True, "seed": 7})
        assert status == 200 and reply.keys() == COMPLETION_KEYS
        assert reply["content"] == "one\ntwo" and reply["has_new_line"] and reply["stop"]
        assert reply["tokens"] == [*TOKENIZER.encode("one\ntwo").ids, 2]
        assert reply["tokens_predicted"] == len(reply["tokens"])
        assert (reply["stop_type"], reply["stopping_word"]) == ("eos", "")
        assert reply["prompt"] == "Say" and reply["model"] == "tiny" and not reply["truncated"]
        prompt_len = len(TOKENIZER.encode("Say").ids)
        assert reply["tokens_evaluated"] == prompt_len and reply["tokens_cached"] == prompt_len // 2
        timings = reply["timings"]
        assert timings["cache_n"] + timings["prompt_n"] == prompt_len
        assert timings["predicted_n"] == reply["tokens_predicted"]
        assert timings["prompt_ms"] >= 0 and timings["predicted_per_second"] >= 0
        settings = reply["generation_settings"]
        assert settings["seed"] == 7 and settings["n_predict"] == -1 and settings["n_ctx"] == 512
        assert settings["temperature"] == 0.8 and settings["min_p"] == 0.05


@in_loop
async def test_a_stream_is_chunks_and_then_the_whole_without_its_text() -> None:
    async with running_daemon(says("one\ntwo")) as daemon:
        body = {"prompt": "Say", "stop": ["wo"], "seed": 7}
        _, whole = await daemon.post("/completion", body)
        *chunks, last = events_of(await daemon.stream("/completion", body | {"stream": True}))
        assert "".join(chunk["content"] for chunk in chunks) == whole["content"] == "one\nt"
        assert all(not chunk["stop"] and "timings" not in chunk for chunk in chunks)
        ids = [token_id for chunk in chunks for token_id in chunk["tokens"]]
        assert ids == TOKENIZER.encode("one\ntwo").ids[: len(ids)] and len(ids) > 3
        assert last["content"] == "" and last["has_new_line"]
        assert (last["stop_type"], last["stopping_word"]) == ("word", "wo")
        assert whole["stop_type"] == "word" and whole["stopping_word"] == "wo"
        timed = events_of(
            await daemon.stream("/completion", body | {"stream": True, "timings_per_token": 1 > 0})
        )
        assert [chunk["timings"]["predicted_n"] for chunk in timed[:-1]] == sorted(
            chunk["timings"]["predicted_n"] for chunk in timed[:-1]
        )


@in_loop
async def test_progress_of_the_prompt_is_told_where_asked() -> None:
    async with running_daemon(says("x")) as daemon:
        body = {"prompt": "Say it", "stream": True, "return_progress": True}
        first, *rest = events_of(await daemon.stream("/completion", body))
        length = len(TOKENIZER.encode("Say it").ids)
        progress = first["prompt_progress"]
        assert progress.keys() == {"total", "cache", "processed", "time_ms"}
        assert progress["total"] == progress["processed"] == length and progress["cache"] == length // 2
        assert first["content"] == "" and all("prompt_progress" not in event for event in rest)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Say", ["Say"]),
        ([40, 41], ["[40, 41]"]),
        ([40, "Say", 41], None),
        (["Say", "So"], ["Say", "So"]),
        (["Say"], ["Say"]),
        ({"prompt_string": "Say"}, ["Say"]),
        ([[40, 41], "Say", {"prompt_string": "So"}, ["Say", 40]], None),
    ],
)
def test_prompts_of_every_shape(prompt: Any, prompts: list[str] | None) -> None:
    expected = {
        "[40, 41]": [40, 41],
        "Say": TOKENIZER.encode("Say").ids,
        "So": TOKENIZER.encode("So").ids,
    }

    async def complete() -> None:
        async with running_daemon(says("x")) as daemon:
            status, reply = await daemon.post("/completion", {"prompt": prompt, "n_predict": 1})
            assert status == 200
            seen = [request.prompt for request in daemon.engine.seen]
            if prompts is not None:
                assert seen == [expected[name] for name in prompts]
            elif len(seen) == 1:
                assert seen == [[40, *expected["Say"], 41]]
            else:
                assert seen == [[40, 41], expected["Say"], expected["So"], [*expected["Say"], 40]]
            assert isinstance(reply, list) == (len(seen) > 1)
            if len(seen) > 1:
                assert [entry["index"] for entry in reply] == list(range(len(seen)))

    in_loop(complete)()


@in_loop
async def test_a_first_text_gets_what_goes_before_raw_prompts() -> None:
    async with running_daemon(says("x")) as daemon:
        folder = daemon.store.models["tiny"].path
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
        await daemon.post("/completion", {"prompt": [["a", 40], [40, "a"], "a"]})
        a = TOKENIZER.encode("a").ids
        assert [request.prompt for request in daemon.engine.seen] == [[1, *a, 40], [40, *a], [1, *a]]


@in_loop
async def test_choices_of_one_prompt() -> None:
    async with running_daemon(says("x")) as daemon:
        _, reply = await daemon.post("/completion", {"prompt": "Say", "n_cmpl": 3})
        assert [entry["index"] for entry in reply] == [0, 1, 2]
        assert len({len(entry["tokens"]) for entry in reply}) == 1


@in_loop
async def test_probabilities() -> None:
    async with running_daemon(says("a")) as daemon:
        body = {"prompt": "Say", "n_probs": 2}
        _, reply = await daemon.post("/completion", body)
        first = reply["completion_probabilities"][0]
        assert first.keys() == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert first["id"] == 67 and first["token"] == "a" and first["bytes"] == [97]
        assert [entry["id"] for entry in first["top_logprobs"]] == [67, 60]
        *chunks, _ = events_of(await daemon.stream("/completion", body | {"stream": True}))
        streamed = [entry for chunk in chunks for entry in chunk.get("completion_probabilities", ())]
        assert streamed == reply["completion_probabilities"]


@in_loop
async def test_nothing_predicted_is_quick_and_leaves_the_prompt_cached() -> None:
    async with running_daemon(tokens=QWEN_INFILL) as daemon:
        assert await daemon.post("/infill", VIM_WARM_UP) == (200, {})
        request = daemon.engine.seen[0]
        assert request.sampling.max_tokens == 0 and request.salt.endswith("\0")
        _, reply = await daemon.post("/completion", {"prompt": "Say", "n_predict": 0})
        assert reply["content"] == "" and reply["tokens_predicted"] == 0 and reply["stop_type"] == "limit"


@in_loop
async def test_llama_vim_gets_the_fields_that_it_shows() -> None:
    async with running_daemon(says("a + 1"), tokens=QWEN_INFILL) as daemon:
        status, reply = await daemon.post("/infill", VIM)
        assert status == 200 and reply.keys() == set(VIM["response_fields"])
        assert (
            reply["content"] == "a + 1" and reply["timings/predicted_n"] == 6 and reply["truncated"] is False
        )
        request = daemon.engine.seen[0]
        tokenizer = daemon.service.models.entries[0].model.tokenizer
        assert tokenizer.decode(request.prompt, special=True) == (
            "<|repo_name|>repository\n<|file_sep|>a.py\none = 1\n\n<|file_sep|>file\n"
            "<|fim_prefix|>def f(a):\n<|fim_suffix|>\n\nf(1)\n<|fim_middle|>    return "
        )
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, 40, 0.9, 0.0)


@in_loop
async def test_what_llama_vim_types_shares_its_warm_prompt() -> None:
    async with running_daemon(says("a"), tokens=QWEN_INFILL) as daemon:
        for body in (VIM_WARM_UP, VIM, VIM | {"prompt": "    return a"}):
            await daemon.post("/infill", body)
        warm, first, second = (request.prompt for request in daemon.engine.seen)
        gap = warm.index(514)
        assert first[: gap + 1] == warm[: gap + 1]
        shared = len(first) - len(TOKENIZER.encode("    return ").ids)
        assert second[:shared] == first[:shared]


@in_loop
async def test_llama_vscode() -> None:
    async with running_daemon(says("return a\n    b\nc"), tokens=QWEN_INFILL) as daemon:
        status, reply = await daemon.post("/infill", VSCODE | {"n_predict": 50})
        assert status == 200 and reply["content"] == "return a\n    b\n"
        assert reply["stop_type"] == "limit"
        await daemon.settle()
        assert daemon.engine.aborted


@in_loop
async def test_the_end_of_a_file_is_a_gap_too() -> None:
    async with running_daemon(tokens=QWEN_INFILL) as daemon:
        for changes in ({}, {"input_prefix": ""}, {"input_extra": []}, {"input_extra": [{"text": "x"}]}):
            status, reply = await daemon.post("/infill", case("c31b") | changes)
            assert status == 200 and reply["stop"]
    async with running_daemon() as daemon:
        error = await refused(daemon, "/infill", case("c31b"), 501)
        assert error["type"] == "not_supported_error" and "tiny" in error["message"]


@in_loop
async def test_old_chunks_make_room_and_that_is_told() -> None:
    async with running_daemon(says("a"), tokens=QWEN_INFILL) as daemon:
        chunks = [{"text": "x = 1\n" * 20, "filename": f"{number}.py"} for number in range(20)]
        _, reply = await daemon.post("/infill", VIM | {"input_extra": chunks, "response_fields": []})
        assert reply["truncated"] is True
        assert "19.py" in reply["prompt"] and "|>0.py" not in reply["prompt"]
        assert VIM["input_prefix"] in reply["prompt"]
        error = await refused(daemon, "/infill", VIM | {"input_prefix": "x = 1\n" * 400})
        assert error["type"] == "exceed_context_size_error"
        assert error["n_ctx"] == 512 and error["n_prompt_tokens"] > 512


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"seed": -1}, {"seed": None}),
        ({"seed": 4294967295}, {"seed": None}),
        ({"temperature": -1}, {"temperature": 0.0}),
        ({"samplers": []}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}),
        ({"samplers": "edkypmxt", "top_k": 5}, {"temperature": 0.8, "top_k": 5, "min_p": 0.05}),
        ({"samplers": ["temperature"], "temperature": 0.3}, {"temperature": 0.3, "top_p": 1.0}),
        ({"repeat_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"repeat_penalty": 1.2, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_penalty": 1.2, "repeat_last_n": -1}, {"repetition_penalty": 1.2}),
        ({"repeat_last_n": 64, "repeat_penalty": 1}, {"repetition_penalty": 1.0}),
        (
            {"logit_bias": [[40, 1.5], ["a", -2], [41, False]]},
            {"logit_bias": {40: 1.5, 67: -2.0, 41: -100.0}},
        ),
        ({"logit_bias": {"40": 1.5, "a": False}}, {"logit_bias": {40: 1.5, 67: -100.0}}),
        ({"max_tokens": 3}, {"max_tokens": 3}),
        ({"max_tokens": 3, "n_predict": -1}, {"max_tokens": None}),
        ({"ignore_eos": True, "n_predict": 1}, {"stop_token_ids": ()}),
        ({"mirostat": 0, "typical_p": 1, "dry_multiplier": 0, "xtc_probability": 0.0}, {}),
        ({"dynatemp_range": 0, "top_n_sigma": -1.0, "min_keep": 0, "lora": [{"id": 0, "scale": 0}]}, {}),
        ({"grammar": "", "json_schema": None, "n_keep": -1, "unknown": {"x": 1}}, {}),
        (dict.fromkeys(("seed", "top_k", "samplers", "logit_bias", "stop", "id_slot")), {}),
    ],
)
def test_options(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    async def complete() -> None:
        async with running_daemon(says("x")) as daemon:
            status, reply = await daemon.post("/completion", {"prompt": "Say"} | fields)
            assert status == 200, reply
            sampling = daemon.engine.seen[0].sampling
            assert {name: getattr(sampling, name) for name in expected} == expected

    in_loop(complete)()


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"xtc_probability": 0.5}, "xtc_probability"),
        ({"dynatemp_range": 0.5}, "dynatemp_range"),
        ({"top_n_sigma": 1.0}, "top_n_sigma"),
        ({"min_keep": 4}, "min_keep"),
        ({"lora": [{"id": 0, "scale": 0.5}]}, "lora"),
        ({"post_sampling_probs": True, "n_probs": 2}, "post_sampling_probs"),
        ({"n_probs": 21}, "n_probs"),
        ({"repeat_penalty": 1.2, "repeat_last_n": 64}, "repeat_last_n"),
        ({"samplers": ["quadratic"]}, "quadratic"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_cmpl": 0}, "n_cmpl"),
        ({"id_slot": 5000}, "id_slot"),
        ({"logit_bias": [[40]]}, "logit_bias"),
        ({"logit_bias": [[True, 1]]}, "logit_bias"),
        ({"logit_bias": {"40": True}}, "logit_bias"),
        ({"logit_bias": {"40": 1000}}, "logit_bias"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["y"]}}, "multimodal_data"),
        ({"prompt": [-1]}, "token id -1"),
        ({"temperature": "hot"}, "temperature"),
        ({"prompt": ""}, "empty"),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    async def refuse() -> None:
        async with running_daemon(says("x")) as daemon:
            for stream in (False, True):
                error = await refused(daemon, "/completion", {"prompt": "Say", "stream": stream} | fields)
                assert error["type"] == "invalid_request_error" and name in error["message"], error

    in_loop(refuse)()


@in_loop
async def test_what_an_answer_must_be_reaches_the_engine() -> None:
    async with running_daemon(says("x"), tokens=QWEN_INFILL) as daemon:
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        for fields in ({"grammar": 'root ::= "x" | "y"'}, {"json_schema": schema}, {"json_schema": {}}):
            for path in ("/completion", "/infill"):
                body = {"prompt": "Say", "input_prefix": "", "input_suffix": "", "n_predict": 1}
                status, reply = await daemon.post(path, body | fields)
                assert status == 200, reply
                assert daemon.engine.seen[-1].sampling.grammar is not None
                assert reply["generation_settings"]["grammar"] == fields.get("grammar", "")
        both = {"prompt": "x", "grammar": 'root ::= "x"', "json_schema": schema}
        assert "json_schema" in (await refused(daemon, "/completion", both))["message"]
        for name, rule in (("grammar", 'root ::= "x'), ("json_schema", {"not": {"type": "string"}})):
            error = await refused(daemon, "/completion", {"prompt": "x", name: rule})
            assert error["type"] == "invalid_request_error"


@in_loop
async def test_an_unwanted_cache_is_neither_read_nor_left() -> None:
    async with running_daemon(says("x")) as daemon:
        for _ in range(2):
            await daemon.post("/completion", {"prompt": "Say", "cache_prompt": False})
        salts = {request.salt for request in daemon.engine.seen}
        assert len(salts) == 2 and "" not in salts


@in_loop
async def test_time_ends_an_answer_after_a_line() -> None:
    async with running_daemon(says("a\nb\nc")) as daemon:
        _, reply = await daemon.post("/completion", {"prompt": "x", "t_max_predict_ms": 0.000001})
        assert reply["content"] == "a\n" and reply["stop_type"] == "limit"
        _, reply = await daemon.post("/completion", {"prompt": "x", "t_max_predict_ms": -1})
        assert reply["content"] == "a\nb\nc"


@in_loop
async def test_tokens_and_back() -> None:
    async with running_daemon() as daemon:
        text = "hi <|im_start|>é🧵"
        _, reply = await daemon.post("/tokenize", {"content": text})
        assert reply == {"tokens": TOKENIZER.encode(text, add_special_tokens=False).ids}
        assert 512 in reply["tokens"]
        _, back = await daemon.post("/detokenize", reply)
        assert back == {"content": text}
        _, plain = await daemon.post("/tokenize", {"content": text, "parse_special": False})
        assert 512 not in plain["tokens"]
        assert (await daemon.post("/detokenize", plain))[1] == {"content": text}
        _, pieces = await daemon.post("/tokenize", {"content": text, "with_pieces": True})
        assert [entry["id"] for entry in pieces["tokens"]] == reply["tokens"]
        joined = b"".join(
            piece.encode() if isinstance(piece, str) else bytes(piece)
            for piece in (entry["piece"] for entry in pieces["tokens"])
        )
        assert joined.decode() == text
        assert any(isinstance(entry["piece"], list) for entry in pieces["tokens"])
        assert "token id 9999" in (await refused(daemon, "/detokenize", {"tokens": [9999]}))["message"]
        assert REPLACEMENT in (await daemon.post("/detokenize", {"tokens": [175]}))[1]["content"]


@in_loop
async def test_what_goes_before_a_raw_prompt_is_put_where_asked() -> None:
    async with running_daemon() as daemon:
        folder = daemon.store.models["tiny"].path
        (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": True}))
        for parse_special in (True, False):
            body = {"content": "hi", "add_special": True, "parse_special": parse_special}
            assert (await daemon.post("/tokenize", body))[1]["tokens"][0] == 1


@in_loop
async def test_a_conversation_as_its_prompt() -> None:
    async with running_daemon() as daemon:
        messages = [{"role": "user", "content": "Say hi"}]
        _, reply = await daemon.post("/apply-template", {"messages": messages})
        assert reply == {"prompt": "<|im_start|>user\nSay hi<|im_end|>\n<|im_start|>assistant\n"}
        _, tokens = await daemon.post("/tokenize", {"content": reply["prompt"]})
        await daemon.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1})
        assert daemon.engine.seen[0].prompt == tokens["tokens"]


@in_loop
async def test_props_tell_the_context_that_is_served() -> None:
    async with running_daemon() as daemon:
        status, reply = await daemon.get("/props?model=tiny&autoload=false")
        assert status == 400 and "not loaded" in reply["error"]["message"]
        status, props = await daemon.get("/props")
        assert status == 200
        defaults = props["default_generation_settings"]
        assert defaults["n_ctx"] == 512 and defaults["params"]["temperature"] == 0.8
        assert props["total_slots"] == 64 and props["chat_template"] == CHATML
        assert props["model_path"].endswith("/tiny") and props["modalities"] == {
            "vision": False,
            "audio": False,
        }
        assert (await daemon.get("/props?model=tiny&autoload=false"))[1] == props
        _, models = await daemon.get("/v1/models")
        model = models["data"][0]
        assert model["meta"]["n_ctx"] == model["meta"]["n_ctx_train"] == 512
        assert model["max_model_len"] == model["context_length"] == 512
        assert model["meta"]["n_vocab"] == 514 and model["meta"]["size"] == 1000


@in_loop
async def test_a_model_that_is_not_loaded_has_no_context_yet() -> None:
    async with running_daemon() as daemon:
        _, models = await daemon.get("/v1/models")
        assert models["data"][0]["meta"] is None and "context_length" not in models["data"][0]


@in_loop
async def test_health_while_the_only_model_loads() -> None:
    async with running_daemon() as daemon:
        for path in ("/health", "/v1/health"):
            assert await daemon.get(path) == (200, {"status": "ok"})
        daemon.engines.release = asyncio.Event()
        await daemon.service.models.open("tiny")
        expected = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}
        assert await daemon.get("/health") == (503, expected)
        assert (await daemon.get("/quantd/version"))[0] == 200
        daemon.engines.release.set()
        await daemon.service.models.entries[0].loaded()
        assert await daemon.get("/v1/health") == (200, {"status": "ok"})


@in_loop
async def test_slots() -> None:
    async with running_daemon() as daemon:
        _, slots = await daemon.get("/slots")
        assert [slot["id"] for slot in slots] == list(range(64))
        assert {slot["n_ctx"] for slot in slots} == {512} and not any(slot["is_processing"] for slot in slots)
        assert (await daemon.get("/slots?fail_on_no_slot=1"))[0] == 200
        daemon.engine.gate.clear()
        running = [asyncio.create_task(daemon.post("/completion", {"prompt": "x"})) for _ in range(64)]
        await until_so(lambda: len(daemon.engine.running) >= 64)
        assert all(slot["is_processing"] for slot in (await daemon.get("/slots"))[1])
        status, reply = await daemon.get("/slots?fail_on_no_slot=1")
        assert status == 503 and reply["error"]["type"] == "unavailable_error"
        daemon.engine.gate.set()
        await asyncio.gather(*running)


@in_loop
async def test_a_slots_prompt_is_saved_restored_and_erased() -> None:
    async with running_daemon(says("x")) as daemon:
        ids = list(range(20, 60))
        await daemon.post("/completion", {"prompt": ids, "id_slot": 3})
        await daemon.post("/completion", {"prompt": "other", "id_slot": 4})
        await daemon.post("/completion", {"prompt": "no slot", "cache_prompt": False})
        _, saved = await daemon.post("/slots/3?action=save", {"filename": "chat.bin"})
        assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (3, "chat.bin", 40)
        assert saved["n_written"] > 0 and saved["timings"]["save_ms"] >= 0
        _, restored = await daemon.post("/slots/5?action=restore", {"filename": "chat.bin"})
        assert restored["n_restored"] == 40 and restored["n_read"] == saved["n_written"]
        request = daemon.engine.seen[-1]
        assert request.prompt == ids and request.sampling.max_tokens == 0
        assert await daemon.post("/slots/5?action=erase", {}) == (200, {"id_slot": 5, "n_erased": 40})
        assert daemon.engine.forgotten == [ids]
        assert (await daemon.post("/slots/5?action=erase", {}))[1]["n_erased"] == 0


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/slots/0?action=save", {"filename": "chat.bin"}, "no prompt"),
        ("/slots/0?action=save", {"filename": "../chat.bin"}, "filename"),
        ("/slots/0?action=save", {}, "filename"),
        ("/slots/0?action=save", {"filename": ".hidden"}, "filename"),
        ("/slots/0?action=restore", {"filename": "missing.bin"}, "missing.bin"),
        ("/slots/0?action=restore", {"filename": "broken.bin"}, "broken.bin"),
        ("/slots/0?action=dance", {}, "dance"),
        ("/slots/0", {}, "action"),
    ],
)
def test_slots_that_cannot_be(path: str, body: dict[str, Any], name: str) -> None:
    async def refuse() -> None:
        async with running_daemon() as daemon:
            folder = daemon.path.parent / "state" / "slots"
            folder.mkdir(parents=True)
            (folder / "broken.bin").write_bytes(b"x")
            assert name in (await refused(daemon, path, body))["message"]

    in_loop(refuse)()


@in_loop
async def test_embeddings_of_its_own_shape_and_no_reranking() -> None:
    async with running_daemon() as daemon:
        _, reply = await daemon.post("/embedding", {"content": "hi"})
        assert [entry["index"] for entry in reply] == [0] and len(reply[0]["embedding"][0]) == 4
        _, several = await daemon.post("/embedding", {"content": ["hi", "ho"], "embd_normalize": -1})
        assert [entry["index"] for entry in several] == [0, 1]
        assert (
            "embd_normalize"
            in (await refused(daemon, "/embedding", {"content": "x", "embd_normalize": 1}))["message"]
        )
        assert "content" in (await refused(daemon, "/embedding", {}))["message"]
        for path in ("/rerank", "/v1/rerank", "/reranking", "/v1/reranking"):
            error = await refused(daemon, path, {"query": "x", "documents": []}, 501)
            assert error["type"] == "not_supported_error"
        assert await daemon.get("/lora-adapters") == (200, [])


@in_loop
async def test_metrics_by_llama_servers_names() -> None:
    async with running_daemon(says("ab")) as daemon:
        await daemon.post("/completion", {"prompt": list(range(20, 30))})
        async with daemon.session.get("http://x/metrics") as response:
            page = await response.text()
        values = {
            name: float(value)
            for name, value in (line.split() for line in page.splitlines() if line.startswith("llamacpp:"))
        }
        assert values.keys() == {
            "llamacpp:" + name
            for name in (
                "prompt_tokens_total",
                "prompt_seconds_total",
                "prompt_tokens_seconds",
                "tokens_predicted_total",
                "tokens_predicted_seconds_total",
                "predicted_tokens_seconds",
                "requests_processing",
                "requests_deferred",
                "n_tokens_max",
                "n_decode_total",
            )
        }
        assert values["llamacpp:prompt_tokens_total"] == 5 and values["llamacpp:tokens_predicted_total"] == 3
        assert values["llamacpp:n_tokens_max"] == 13 and values["llamacpp:requests_processing"] == 0


@in_loop
async def test_unknown_models_and_errors_in_streams() -> None:
    async with running_daemon() as daemon:
        error = await refused(daemon, "/completion", {"prompt": "x", "model": "nosuch"}, 404)
        assert error["type"] == "not_found_error"
        await daemon.get("/props")
        daemon.engine.gate.clear()
        url = "http://x/completion"
        async with daemon.session.post(url, json={"prompt": "x", "stream": True}) as response:
            daemon.engine.died.set_result("gone")
            (frame,) = events_of((await response.read()).decode())
            assert frame["error"]["code"] == 503 and frame["error"]["type"] == "unavailable_error"
