"""OpenAI's embeddings and the neutral service below: forms, order, bounds, faults, clients that leave."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from pathlib import Path
from typing import Any

import openai
import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon
from scripted_engine import FAULTY_TOKEN, vector_of
from test_disconnects import num_running, open_request
from test_openai_sdk import async_client
from waiting import until_so

from quantd.daemon.embedding_head import EmbeddingHead
from quantd.daemon.embeddings import MOST_AT_ONCE, EmbeddingRequest, floats
from quantd.daemon.errors import GenerationError
from quantd.daemon.tokenizer import Tokenizer
from quantd.engine.errors import ContextLengthError, RequestError
from quantd.engine.request import EmbeddingParams
from quantd.quant.errors import CheckpointError

PATH = "/v1/embeddings"


def ids_of(daemon: Daemon, text: str) -> list[int]:
    return Tokenizer.load(daemon.store.get("tiny").path).encode(text)


def as_float32(values: list[float]) -> list[float]:
    return list(struct.unpack(f"{len(values)}f", struct.pack(f"{len(values)}f", *values)))


@in_loop
async def test_a_reply_has_openais_shape() -> None:
    async with running_daemon() as daemon:
        status, reply = await daemon.post(PATH, {"model": "tiny", "input": [[40, 41, 42], [50]], "user": "x"})
        assert status == 200
        vectors = [as_float32([3, 40, 42, 0.1]), as_float32([1, 50, 50, 0.1])]
        assert reply == {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": vector}
                for index, vector in enumerate(vectors)
            ],
            "model": "tiny",
            "usage": {"prompt_tokens": 4, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}},
        }


@in_loop
async def test_every_form_of_input() -> None:
    async with running_daemon() as daemon:
        texts = ["hello world", "the ant"]
        ids = [ids_of(daemon, text) for text in texts]
        forms: list[tuple[Any, list[list[int]]]] = [
            (texts[0], ids[:1]),
            (texts, ids),
            (ids[0], ids[:1]),
            (ids, ids),
            ([texts[1]], ids[1:]),
        ]
        for given, prompts in forms:
            for encoding in ("float", "base64", None):
                body = {"model": "tiny", "input": given, "encoding_format": encoding}
                status, reply = await daemon.post(PATH, body)
                assert status == 200, reply
                found = [entry["embedding"] for entry in reply["data"]]
                if encoding == "base64":
                    found = [list(floats(base64.b64decode(text))) for text in found]
                assert found == [as_float32(vector_of(prompt)) for prompt in prompts]


@pytest.mark.parametrize("transport", ["tcp", "unix"])
def test_the_official_sdk(transport: str) -> None:
    """It asks for base64 unless told otherwise."""

    async def talk() -> None:
        async with running_daemon() as daemon, async_client(daemon, transport) as client:
            prompts = [[40 + i, 41] for i in range(20)]
            expected = [as_float32(vector_of(prompt)) for prompt in prompts]
            packed = await client.embeddings.create(model="tiny", input=prompts)
            plain = await client.embeddings.create(model="tiny", input=prompts, encoding_format="float")
            for reply in (packed, plain):
                assert [entry.embedding for entry in reply.data] == expected
                assert [entry.index for entry in reply.data] == list(range(20))
                assert reply.usage.prompt_tokens == reply.usage.total_tokens == 40
            await client.embeddings.create(model="tiny", input="hi", dimensions=3)
            assert daemon.engine.seen[-1].embedding == EmbeddingParams(dimensions=3)
            with pytest.raises(openai.BadRequestError, match="between 1 and the model's 4, got 5"):
                await client.embeddings.create(model="tiny", input="hi", dimensions=5)

    in_loop(talk)()


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"input": ""}, "input", r"input\[0\] is empty"),
        ({"input": ["a", ""]}, "input", r"input\[1\] is empty"),
        ({"input": []}, "input", "empty list"),
        ({"input": [[40], []]}, "input", r"input\[1\] is empty"),
        ({"input": ["a", [40]]}, "input", "only one of the two"),
        ({"input": [40, 1.5]}, "input", "only one of the two"),
        ({"input": [True]}, "input", "only one of the two"),
        ({"input": {"text": "a"}}, "input", "input"),
        ({}, "input", "input"),
        ({"input": [[40], [20, -1, 30]]}, "input", r"input\[1\]: token id -1"),
        ({"input": [514]}, "input", r"input\[0\]: token id 514 is not in 0\.\.513"),
        ({"input": "a", "dimensions": 0}, "dimensions", "between 1 and the model's 4"),
        ({"input": "a", "dimensions": "8"}, "dimensions", "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "encoding_format"),
    ],
)
def test_what_is_wrong_is_refused_by_name(body: dict[str, Any], param: str, message: str) -> None:
    async def ask() -> None:
        async with running_daemon() as daemon:
            status, reply = await daemon.post(PATH, {"model": "tiny"} | body)
            assert status == 400, reply
            assert reply["error"]["param"] == param
            with pytest.raises(RequestError, match=message):
                raise RequestError(reply["error"]["message"])
            assert not daemon.engines.started or not daemon.engine.seen

    in_loop(ask)()


@in_loop
async def test_an_overlong_input_is_refused_with_both_numbers_before_anything_runs() -> None:
    async with running_daemon() as daemon:
        limit = 512
        status, reply = await daemon.post(PATH, {"input": [[40] * limit]})
        assert status == 200 and reply["usage"]["prompt_tokens"] == limit
        status, reply = await daemon.post(PATH, {"input": [[40], [41] * (limit + 1)]})
        error = reply["error"]
        assert (status, error["code"], error["param"]) == (400, "context_length_exceeded", "input")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (limit + 1, limit)
        assert error["message"].startswith(f"input[1]: the prompt has {limit + 1} tokens")
        assert len(daemon.engine.seen) == 1


@in_loop
async def test_what_is_to_be_cut_is_cut() -> None:
    async with running_daemon() as daemon:
        inputs = ["the ant " * 400, [40] * 600, "hi"]
        for context_len, most in ((None, 512), (20, 20), (10_000, 512)):
            request = EmbeddingRequest(model=None, inputs=inputs, truncate=True, context_len=context_len)
            found = await daemon.service.embed(request)
            lengths = [int(floats(vector)[0]) for vector in found.vectors]
            assert lengths[:2] == [most, most] and found.usage.prompt_tokens == sum(lengths)
        with pytest.raises(ContextLengthError, match=r"input\[1\].* 600 tokens, but .* asks for is 20"):
            bounded = EmbeddingRequest(model=None, inputs=["a", [40] * 600], context_len=20)
            await daemon.service.embed(bounded)


@in_loop
async def test_no_inputs_give_no_vectors_from_a_loaded_model() -> None:
    """What Ollama's clients load a model with."""
    async with running_daemon() as daemon:
        found = await daemon.service.embed(EmbeddingRequest(model="tiny", inputs=[]))
        assert (found.model, list(found.vectors), found.usage.prompt_tokens) == ("tiny", [], 0)
        assert daemon.service.models.entries[0].state == "ready"


@pytest.mark.parametrize("max_queue", [8, 512])
@pytest.mark.parametrize(("number", "length"), [(1000, 1), (200, 100), (60, 500)])
def test_many_texts_go_through_a_few_at_a_time(max_queue: int, number: int, length: int) -> None:
    async def ask() -> None:
        async with running_daemon(max_queue=max_queue) as daemon:
            await daemon.post(PATH, {"input": "hi"})
            daemon.engine.seen.clear()
            daemon.engine.gate.clear()
            prompts = [[3 + i % 200] * length for i in range(number)]
            asked = asyncio.create_task(daemon.post(PATH, {"input": prompts}))
            at_once = min(MOST_AT_ONCE, max_queue, 2048 // length)
            await until_so(lambda: num_running(daemon) == at_once)
            await asyncio.sleep(0.02)
            assert num_running(daemon) == at_once
            daemon.engine.gate.set()
            status, reply = await asked
            assert status == 200
            assert [entry["embedding"] for entry in reply["data"]] == [
                as_float32(vector_of(prompt)) for prompt in prompts
            ]
            assert [request.prompt for request in daemon.engine.seen] == prompts
            await daemon.service.wait_idle()

    in_loop(ask)()


@in_loop
async def test_texts_count_towards_what_is_under_way() -> None:
    async with running_daemon(max_queue=70) as daemon:
        await daemon.post(PATH, {"input": "hi"})
        daemon.engine.gate.clear()
        asked = asyncio.create_task(daemon.post(PATH, {"input": [[40]] * 1000}))
        await until_so(lambda: num_running(daemon) == MOST_AT_ONCE)
        status, reply = await daemon.post(PATH, {"input": [[40]] * 7})
        assert (status, reply["error"]["code"]) == (429, "overloaded")
        also = asyncio.create_task(daemon.post(PATH, {"input": [[40]] * 6}))
        await until_so(lambda: num_running(daemon) == MOST_AT_ONCE + 6)
        daemon.engine.gate.set()
        assert [(await task)[0] for task in (asked, also)] == [200, 200]


@in_loop
async def test_one_text_that_fails_fails_the_request_and_ends_the_others() -> None:
    async with running_daemon() as daemon:
        prompts = [[40]] * 50 + [[FAULTY_TOKEN]] + [[41]] * 500
        status, reply = await daemon.post(PATH, {"input": prompts})
        assert (status, reply["error"]["message"]) == (500, "a faulty token")
        await daemon.settle()
        await daemon.service.wait_idle()
        assert len(daemon.engine.seen) < 200
        with pytest.raises(GenerationError, match="faulty"):
            await daemon.service.embed(EmbeddingRequest(model="tiny", inputs=prompts))
        assert (await daemon.post(PATH, {"input": [[40]] * 3}))[0] == 200


@in_loop
async def test_an_engine_that_dies_is_told() -> None:
    async with running_daemon() as daemon:
        await daemon.post(PATH, {"input": "hi"})
        daemon.engine.gate.clear()
        asked = asyncio.create_task(daemon.post(PATH, {"input": [[40]] * 100}))
        await until_so(lambda: num_running(daemon) == MOST_AT_ONCE)
        daemon.engine.died.set_result("the engine was killed")
        status, reply = await asked
        assert (status, reply["error"]["code"]) == (503, "engine_died")
        assert (await daemon.post(PATH, {"input": "hi"}))[0] == 200


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_leaving_aborts_all_texts(tcp: bool) -> None:
    async def leave() -> None:
        async with running_daemon() as daemon:
            await daemon.post(PATH, {"input": "hi"})
            daemon.engine.gate.clear()
            connection = open_request(daemon, {"input": [[40]] * 300}, PATH, tcp)
            await until_so(lambda: num_running(daemon) == MOST_AT_ONCE)
            connection.close()
            await until_so(lambda: num_running(daemon) == 0)
            await daemon.service.wait_idle()
            assert len(daemon.engine.aborted) == MOST_AT_ONCE
            assert len(daemon.engine.seen) == 1 + MOST_AT_ONCE
            assert daemon.service.models.entries[0].model.num_requests == 0

    in_loop(leave)()


def write_head(folder: Path, modules: list[str] | None, pooling: object | None) -> Path:
    """As sentence-transformers saves a model; a module without a dot is one of its usual ones."""
    if modules is not None:
        entries = [
            {
                "idx": index,
                "name": str(index),
                "path": "" if not index else f"{index}_{kind.rpartition('.')[2]}",
                "type": kind if "." in kind else f"sentence_transformers.models.{kind}",
            }
            for index, kind in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(entries))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


FLAGS = {
    "word_embedding_dimension": 8,
    "pooling_mode_cls_token": False,
    "pooling_mode_mean_tokens": False,
    "pooling_mode_max_tokens": False,
    "pooling_mode_mean_sqrt_len_tokens": False,
    "pooling_mode_weightedmean_tokens": False,
    "pooling_mode_lasttoken": False,
    "include_prompt": True,
}
NEW = "sentence_transformers.sentence_transformer.modules.pooling.Pooling"


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (None, None, EmbeddingParams(pooling="mean", normalize=True)),
        # As Qwen3-Embedding has it.
        (
            ["Transformer", "Pooling", "Normalize"],
            FLAGS | {"pooling_mode_lasttoken": True},
            EmbeddingParams(pooling="last", normalize=True),
        ),
        (
            ["Transformer", "Pooling"],
            FLAGS | {"pooling_mode_mean_tokens": True},
            EmbeddingParams(pooling="mean", normalize=False),
        ),
        (
            ["Transformer", NEW, "Normalize"],
            {"embedding_dimension": 8, "pooling_mode": "cls", "include_prompt": True},
            EmbeddingParams(pooling="first", normalize=True),
        ),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode": ["lasttoken"]},
            EmbeddingParams(pooling="last", normalize=False),
        ),
        # A GGUF says how it pools and no more.
        (None, {"pooling_mode": "lasttoken"}, EmbeddingParams(pooling="last", normalize=True)),
    ],
)
def test_a_model_s_files_say_how_it_embeds(
    tmp_path: Path, modules: list[str] | None, pooling: object, expected: EmbeddingParams
) -> None:
    head = EmbeddingHead.read(write_head(tmp_path, modules, pooling))
    assert head.params(None, None) == expected
    assert head.params(8, True).normalize and not head.params(8, False).normalize
    assert head.params(8, None).dimensions == 8


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (["Transformer", "Pooling", "Dense", "Normalize"], FLAGS, "module 'Dense'"),
        (["Transformer", "Pooling"], FLAGS | {"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
        (
            ["Transformer", "Pooling"],
            FLAGS | {"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True},
            "max and mean",
        ),
        (None, {"pooling_mode": "rank"}, "rank"),
    ],
)
def test_ways_to_embed_that_are_not_here_are_refused_by_name(
    tmp_path: Path, modules: list[str] | None, pooling: object, message: str
) -> None:
    head = EmbeddingHead.read(write_head(tmp_path, modules, pooling))
    with pytest.raises(RequestError, match=message):
        head.params(None, None)


@pytest.mark.parametrize("data", ["{", "[1]", '{"type": "x"}', "[" * 100_000])
def test_damaged_files_are_named(tmp_path: Path, data: str) -> None:
    (tmp_path / "modules.json").write_text(data)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        EmbeddingHead.read(tmp_path)


@in_loop
async def test_a_model_s_head_decides_and_a_chat_does_not_ask_it() -> None:
    async with running_daemon() as daemon:
        write_head(daemon.store.get("tiny").path, ["Transformer", "Pooling", "Dense"], FLAGS)
        status, reply = await daemon.post(PATH, {"model": "tiny", "input": "hi"})
        assert status == 400 and "Dense" in reply["error"]["message"]
        assert (await daemon.post("/v1/completions", {"prompt": "hi", "max_tokens": 1}))[0] == 200


def test_floats_are_little_endian() -> None:
    assert floats(bytes.fromhex("0000803f0000c07f000080ff"))[::2] == (1.0, -math.inf)
