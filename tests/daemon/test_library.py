"""Models fetched, made, copied and deleted through a daemon, by Ollama's routes and its official package."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import io
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import ollama
import pytest
from daemon_in_loop import Daemon, in_loop, running_daemon
from fake_models import write_model
from gguf_files import write_tiny
from hub_server import Hub, running_hub
from processes import own_children
from test_ollama import refusal
from test_ollama_sdk import async_client, with_sync
from test_store import safetensors_bytes
from waiting import until_so

from quantd.daemon.preset import Preset
from quantd.daemon.store import Store
from quantd.daemon.wire.stream import Timing

SHORT = {"num_predict": 3}


def add_model(store: Store, folder: Path, name: str, **config: object) -> None:
    """A model with a tokenizer, a template and a little of weights."""
    write_model(folder)
    sizes = {"model_type": "llama", "max_position_embeddings": 512, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(sizes | config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes({"a": 8}))
    store.import_path(folder, name)


@contextlib.asynccontextmanager
async def daemon_with_store(folder: Path) -> AsyncIterator[tuple[Daemon, ollama.AsyncClient]]:
    """A daemon over a real store that has the model `base`."""
    store = Store(folder / "models")
    add_model(store, folder / "files", "base")
    async with running_daemon(store=store) as daemon, async_client(daemon) as client:
        yield daemon, client


async def told(daemon: Daemon, path: str, body: object) -> list[dict[str, Any]]:
    async with daemon.session.post(f"http://x{path}", json=body) as response:
        assert response.status == 200 and response.headers["Content-Type"] == "application/x-ndjson"
        return [json.loads(line) for line in (await response.read()).splitlines()]


@in_loop
async def test_a_copy_outlives_its_original(tmp_path: Path) -> None:
    async with daemon_with_store(tmp_path) as (_, client):
        assert (await client.copy("base", "team/mine:v2")).status == "success"
        names = [model.model for model in (await client.list()).models]
        assert sorted(names) == ["base:latest", "team/mine:v2"]
        assert (await client.show("team/mine:v2")).details.parent_model == "base:latest"
        await client.delete("base")
        reply = await client.chat("team/mine:v2", [{"role": "user", "content": "hi"}], options=SHORT)
        assert reply.message.content == "user\nhi"[: len(reply.message.content)]
        assert [model.model for model in (await client.list()).models] == ["team/mine:v2"]


@in_loop
async def test_a_model_of_ones_own(tmp_path: Path) -> None:
    async with daemon_with_store(tmp_path) as (daemon, client):
        parameters = {"temperature": 0.1, "num_ctx": 64, "stop": ["zz"], "num_predict": 2, "seed": 3}
        made = await client.create(
            "mario",
            from_="base",
            system="You are Mario.",
            parameters=parameters | {"repeat_penalty": 1.2},
            license=["MIT", "and more"],
            messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        )
        assert made.status == "success"
        shown = await client.show("mario")
        assert shown.license == "MIT\nand more" and shown.modelinfo["llama.context_length"] == 64
        lines = (shown.parameters or "").splitlines()
        assert dict(line.split(None, 1) for line in lines) == {
            "num_ctx": "64",
            "temperature": "0.1",
            "seed": "3",
            "repeat_penalty": "1.2",
            "num_predict": "2",
            "stop": '"zz"',
        }
        reply = await client.chat("mario", [{"role": "user", "content": "hi"}])
        assert reply.eval_count == 2 and daemon.engine.seen[-1].sampling.seed == 3
        tokenizer = daemon.service.models.entries[0].model.tokenizer
        prompt = tokenizer.decode(daemon.engine.seen[-1].prompt)
        assert prompt == "system\nYou are Mario.\nuser\na\nassistant\nb\nuser\nhi\nassistant\n"
        assert Preset.read(daemon.store.get("base").path) == Preset()


@in_loop
async def test_a_model_made_again_replaces_the_one_in_memory(tmp_path: Path) -> None:
    async with daemon_with_store(tmp_path) as (daemon, client):
        await client.create("mine", from_="base", system="One.")
        await client.generate("mine")
        first = daemon.engine
        await client.create(
            "mine", from_="mine", parameters={"top_k": 3}, template="<{{ messages[0].content }}>"
        )
        assert first.closed and not daemon.service.models.entries
        await client.chat("mine", [{"role": "user", "content": "hi"}], options=SHORT)
        request = daemon.engine.seen[-1]
        tokenizer = daemon.service.models.entries[0].model.tokenizer
        assert tokenizer.decode(request.prompt) == "<One.>" and request.sampling.top_k == 3
        assert (daemon.store.get("base").path / "chat_template.jinja").read_text().startswith("{% for")
        assert [path for path in daemon.store.root.iterdir() if path.name.startswith(".partial")] == []


@in_loop
async def test_files_that_are_sent_become_a_model(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf")
    async with daemon_with_store(tmp_path) as (daemon, client):
        digest = await client.create_blob(tmp_path / "tiny.gguf")
        assert digest == await client.create_blob(tmp_path / "tiny.gguf")
        lines = await told(daemon, "/api/create", {"model": "sent", "files": {"tiny.gguf": digest}})
        assert lines[-1] == {"status": "success"} and {"status": "preparing"} in lines
        shown = await client.show("sent")
        assert (shown.details.format, shown.details.quantization_level) == ("gguf", "Q8_0")
        _, verbose = await daemon.post("/api/show", {"model": "sent", "verbose": True})
        assert {"name": "token_embd.weight", "type": "Q8_0", "shape": [263, 32]} in verbose["tensors"]
        folder = {path.name: await client.create_blob(path) for path in (tmp_path / "files").iterdir()}
        await client.create("folder", files=folder, system="Hi.")
        assert (await client.show("folder")).details.format == "safetensors"
        _, verbose = await daemon.post("/api/show", {"model": "folder", "verbose": True})
        assert verbose["tensors"] == [{"name": "a", "type": "F32", "shape": [8]}]
        blobs = list((daemon.store.root / ".blobs").iterdir())
        assert len(blobs) == len(folder) + 1
        await client.delete("sent")
        await client.delete("folder")
        assert list((daemon.store.root / ".blobs").iterdir()) == []


@in_loop
async def test_blobs_are_what_their_digest_says(tmp_path: Path) -> None:
    async with daemon_with_store(tmp_path) as (daemon, _):
        data = b"x" * 3_000_000
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        url = f"http://x/api/blobs/{digest}"
        async with daemon.session.head(url) as response:
            assert response.status == 404
        async with daemon.session.post(url, data=io.BytesIO(data[1:])) as response:
            assert response.status == 400 and "digest mismatch" in (await response.json())["error"]
        assert list((daemon.store.root / ".blobs").iterdir()) == []
        for status in (201, 200):
            async with daemon.session.post(url, data=io.BytesIO(data)) as response:
                assert response.status == status
        async with daemon.session.head(url) as response:
            assert response.status == 200
        for bad in ("sha256:xyz", "md5:1", "..", "sha256:" + "0" * 63 + "/"):
            async with daemon.session.post(f"http://x/api/blobs/{bad}", data=b"") as response:
                assert response.status in (400, 404, 405)


@in_loop
async def test_a_client_that_leaves_while_it_sends_leaves_nothing(tmp_path: Path) -> None:
    async with daemon_with_store(tmp_path) as (daemon, _):

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * 100_000

        url = f"http://x/api/blobs/sha256:{'0' * 64}"
        sending = asyncio.create_task(daemon.session.post(url, data=endless()).__aenter__())
        blobs = daemon.store.root / ".blobs"
        await until_so(lambda: blobs.is_dir() and any(blobs.iterdir()))
        sending.cancel()
        await until_so(lambda: not any(blobs.iterdir()))


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"from": "base", "quantize": "q4_K_M"}, "quantize"),
        ({"from": "base", "adapters": {"a": "sha256:0"}}, "adapters"),
        ({"from": "base", "renderer": "x"}, "renderer"),
        ({"modelfile": "FROM base"}, "modelfile"),
        ({"from": "base", "parameters": {"mirostat": 1}}, "mirostat"),
        ({"from": "base", "parameters": {"num_ctx": "big"}}, "num_ctx"),
        ({"from": "base", "messages": [{"role": "critic"}]}, "messages[0].role"),
        ({"from": "base", "model": "a b"}, "model"),
        ({}, "from is required"),
        ({"files": {"a.gguf": "sha256:" + "0" * 64}}, "a.gguf"),
        ({"files": {"a.gguf": "nothing"}}, "digest"),
        ({"files": {"../a.gguf": "sha256:" + "0" * 64}}, "files"),
        ({"files": {"a.bin": "sha256:" + "0" * 64}}, "files"),
    ],
)
def test_what_create_refuses_by_name(tmp_path: Path, body: dict[str, object], named: str) -> None:
    async def refused() -> None:
        async with running_daemon() as daemon:
            assert named in await refusal(daemon, "/api/create", {"model": "mine"} | body)

    in_loop(refused)()


@in_loop
async def test_what_cannot_be_made_is_told(tmp_path: Path) -> None:
    async with daemon_with_store(tmp_path) as (daemon, client):
        lines = await told(daemon, "/api/create", {"model": "mine", "from": "nosuch"})
        assert "'nosuch'" in lines[-1]["error"]
        with pytest.raises(ollama.ResponseError, match="'nosuch'") as missing:
            await client.create("mine", from_="nosuch")
        assert missing.value.status_code == 404
        with pytest.raises(ollama.ResponseError, match="'nosuch'"):
            await client.copy("nosuch", "mine")
        with pytest.raises(ollama.ResponseError, match="'nosuch'"):
            await client.delete("nosuch")
        with pytest.raises(ollama.ResponseError, match="not valid") as broken:
            await client.create("mine", from_="base", template="{{ .System }}")
        assert broken.value.status_code == 400
        assert [model.model for model in (await client.list()).models] == ["base:latest"]
        with pytest.raises(ollama.ResponseError, match="registry"):
            await client.push("base")


@in_loop
async def test_deleting_waits_for_what_runs_and_gives_memory_back(tmp_path: Path) -> None:
    async with daemon_with_store(tmp_path) as (daemon, client):
        await client.generate("base")
        daemon.engine.gate.clear()
        answer = asyncio.create_task(client.chat("base", [{"role": "user", "content": "hi"}], options=SHORT))
        await until_so(lambda: bool(daemon.engine.running))
        deleting = asyncio.create_task(client.delete("base"))
        await until_so(lambda: not daemon.store.list())
        late = asyncio.create_task(client.generate("base", "hi"))
        await asyncio.sleep(0.05)
        assert not deleting.done() and not daemon.engine.closed
        daemon.engine.gate.set()
        assert (await answer).eval_count == 3
        await deleting
        assert daemon.engine.closed and not daemon.service.models.entries
        with pytest.raises(ollama.ResponseError, match="'base'"):
            await late


@in_loop
async def test_pulling(tmp_path: Path) -> None:
    async with daemon_with_store(tmp_path) as (daemon, client):
        lines = await told(daemon, "/api/pull", {"name": "base:latest"})  # here, and nothing to fetch
        assert [line["status"] for line in lines] == ["pulling manifest", "success"]
        assert (await client.pull("base")).status == "success"
        lines = await told(daemon, "/api/pull", {"model": "llama3.2"})
        assert lines[0] == {"status": "pulling manifest"} and "hf:ORG/REPO" in lines[-1]["error"]
        with pytest.raises(ollama.ResponseError, match="hf:ORG/REPO") as missing:
            await client.pull("llama3.2")
        assert missing.value.status_code == 404
        assert await refusal(daemon, "/api/pull", {}) == "model is required"
        sync = await with_sync(daemon, lambda sync: list(sync.pull("base", stream=True)))
        assert sync[-1].status == "success"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that pulls go to."""
    write_tiny(tmp_path / "tiny.gguf")
    files = {"m-Q8_0.gguf": (tmp_path / "tiny.gguf").read_bytes(), "README.md": b"x"}
    with running_hub({"org/quants": files}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


@in_loop
async def test_pulling_from_a_hub(tmp_path: Path, hub: Hub) -> None:
    async with daemon_with_store(tmp_path) as (daemon, client):
        name = "hf.co/org/quants:Q8_0"
        lines = await told(daemon, "/api/pull", {"model": name})
        transfers = [line for line in lines if "digest" in line]
        assert transfers and all(re.fullmatch("sha256:[0-9a-f]{64}", line["digest"]) for line in transfers)
        total = len(hub.repos["org/quants"]["m-Q8_0.gguf"])
        assert {line["total"] for line in transfers} == {total} and transfers[-1]["completed"] == total
        assert [line["status"] for line in lines[-2:]] == ["writing manifest", "success"]
        assert {"status": "verifying sha256 digest"} in lines
        assert (await client.show(name)).details.quantization_level == "Q8_0"
        with pytest.raises(ollama.ResponseError, match="Q4_0"):
            await client.pull("hf.co/org/quants:Q4_0")


@in_loop
async def test_a_client_that_leaves_ends_its_pull(tmp_path: Path, hub: Hub) -> None:
    async with daemon_with_store(tmp_path) as (daemon, client):
        hub.released.clear()
        lines = await client.pull("hf.co/org/quants:Q8_0", stream=True)
        assert (await anext(lines)).status == "pulling manifest"
        await until_so(lambda: bool(own_children()))
        await lines.aclose()
        await until_so(lambda: not own_children())
        hub.released.set()
        assert [model.name for model in daemon.store.list()] == ["base"]
        assert (await client.pull("hf.co/org/quants:Q8_0")).status == "success"


@in_loop
async def test_a_pull_that_is_called_off_leaves_nothing(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip waits for an index that does not answer; both it and what it has begun go."""
    monkeypatch.setenv("PIP_INDEX_URL", f"{hub.endpoint}/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    async with daemon_with_store(tmp_path) as (daemon, client):
        hub.released.clear()
        lines = await client.pull("pypi:tiny", stream=True)
        assert (await anext(lines)).status == "pulling manifest"
        await until_so(lambda: len(own_children()) >= 2 and any(daemon.store.root.glob(".partial-*")))
        await lines.aclose()
        await until_so(lambda: not own_children())
        assert list(daemon.store.root.glob(".partial-*")) == []
        hub.released.set()


@in_loop
async def test_silence_is_filled_with_the_last_line(tmp_path: Path, hub: Hub) -> None:
    store = Store(tmp_path / "models")
    async with running_daemon(store=store, timing=Timing(ping_seconds=0.05)) as daemon:
        hub.released.clear()
        asking = daemon.session.post("http://x/api/pull", json={"model": "hf.co/org/quants:Q8_0"})
        async with asking as response:
            lines = [await response.content.readline() for _ in range(3)]
            assert set(lines) == {b'{"status":"pulling manifest"}\n'}
        hub.released.set()
        await until_so(lambda: not own_children())
