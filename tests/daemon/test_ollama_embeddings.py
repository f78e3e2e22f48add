"""Ollama's embeddings, new and old."""

from __future__ import annotations

import math

import ollama
import pytest
from daemon_in_loop import in_loop, running_daemon
from scripted_engine import vector_of
from test_ollama_sdk import daemon_and_client, with_sync

EMBED = "/api/embed"


@in_loop
async def test_one_and_many() -> None:
    async with running_daemon() as daemon:
        status, one = await daemon.post(EMBED, {"model": "tiny:latest", "input": "one"})
        assert status == 200 and one["model"] == "tiny:latest" and len(one["embeddings"]) == 1
        assert one["prompt_eval_count"] == len(daemon.engine.seen[0].prompt)
        assert all(type(one[name]) is int and one[name] > 0 for name in ("total_duration", "load_duration"))
        _, many = await daemon.post(EMBED, {"model": "tiny", "input": ["two", "one"], "keep_alive": "1h"})
        assert many["embeddings"][1] == one["embeddings"][0]
        assert daemon.service.models.entries[0].model.keep_alive.seconds_left > 3500
        asked = daemon.engine.seen[0].embedding
        assert asked is not None and asked.normalize
        assert one["embeddings"][0] == pytest.approx(vector_of(daemon.engine.seen[0].prompt))


@in_loop
async def test_dimensions_and_lengths() -> None:
    async with running_daemon() as daemon:
        await daemon.post(EMBED, {"model": "tiny", "input": "one", "dimensions": 2})
        asked = daemon.engine.seen[-1].embedding
        assert asked is not None and asked.dimensions == 2
        await daemon.post(EMBED, {"model": "tiny", "input": "one", "dimensions": 0})
        assert daemon.engine.seen[-1].embedding.dimensions is None
        long = {"model": "tiny", "input": ["x", "y" * 600]}
        for truncate in (None, False):
            status, reply = await daemon.post(EMBED, long | {"truncate": truncate})
            assert status == 400 and "input[1]" in reply["error"] and "512" in reply["error"]
        assert (await daemon.post(EMBED, long | {"truncate": True}))[0] == 200
        assert len(daemon.engine.seen[-1].prompt) == 512
        status, reply = await daemon.post(EMBED, long | {"truncate": True, "options": {"num_ctx": 16}})
        assert status == 200 and len(daemon.engine.seen[-1].prompt) == 16


@in_loop
async def test_nothing_to_embed_loads() -> None:
    async with running_daemon() as daemon:
        for input in ("", [], None):
            assert await daemon.post(EMBED, {"model": "tiny", "input": input}) == (
                200,
                {"model": "tiny", "embeddings": []},
            )
        assert await daemon.post("/api/embeddings", {"model": "tiny"}) == (200, {"embedding": []})
        assert len(daemon.engines.started) == 1
        await daemon.post(EMBED, {"model": "tiny", "input": "", "keep_alive": 0})
        assert not daemon.service.models.entries


@pytest.mark.parametrize("input", [3, [3], {"text": "x"}, [["x"]]])
def test_what_is_no_text(input: object) -> None:
    async def refused() -> None:
        async with running_daemon() as daemon:
            status, reply = await daemon.post(EMBED, {"model": "tiny", "input": input})
            assert status == 400 and "input" in reply["error"]

    in_loop(refused)()


@in_loop
async def test_the_official_package() -> None:
    async with daemon_and_client() as (daemon, client):
        new = await client.embed("tiny", ["one", "two"], truncate=True, dimensions=2)
        assert [len(vector) for vector in new.embeddings] == [4, 4] and new.prompt_eval_count
        old = await client.embeddings("tiny", "one", keep_alive=-1)
        assert len(old.embedding) == 4 and not math.isnan(sum(old.embedding))
        assert await with_sync(daemon, lambda sync: sync.embed("tiny", "one").embeddings[0]) == list(
            old.embedding
        )
        with pytest.raises(ollama.ResponseError, match="600"):
            await client.embed("tiny", "x" * 600)
        assert await client.list()
