"""Every handed case as it was handed, against a daemon with a small real model.

What each is about is tested beside its kind. c13 is a client that leaves and c17 wants a small pool: they are
in test_daemon.py. c25 wants a short context.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_daemon import CHAT, DATA, Served, case, serve

from quantd.daemon.store import Store

NAMES = sorted(path.stem for path in (DATA / "cases").glob("*.json"))
LIMIT = 128


@pytest.fixture(scope="module")
def home(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    Store(home / "models").import_path(smollm2, "smollm2")
    return home


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Served]:
    with serve(home, "smollm2", "--kv-memory", "64MiB") as daemon:
        yield daemon


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("c13", "c17", "c25")])
def test_its_status(served: Served, name: str) -> None:
    handed = json.loads((DATA / "cases" / f"{name}.json").read_text())
    expected = handed["expect"]["status"]
    with served.http() as http:
        response = http.request(handed["method"], handed["path"], content=json.dumps(handed["body"]))
    assert response.status_code in ([expected] if isinstance(expected, int) else expected), response.text


def test_one_conversation_is_one_prompt(served: Served) -> None:
    """Case c04."""
    numbers = set()
    for name, path, read in (
        ("c04", "/v1/responses", lambda reply: reply["usage"]["input_tokens"]),
        ("c04b", CHAT, lambda reply: reply["usage"]["prompt_tokens"]),
        ("c04c", "/v1/messages", lambda reply: reply["usage"]["input_tokens"]),
        ("c04d", "/api/chat", lambda reply: reply["prompt_eval_count"]),
    ):
        numbers.add(read(served.post(path, case(name))[1]))
    assert len(numbers) == 1


def test_vectors_in_both_encodings(served: Served) -> None:
    """Case c37."""
    texts = vectors_of(served, case("c37"))
    floats = vectors_of(served, case("c37b"))
    read = [
        list(struct.unpack(f"<{len(vector)}f", base64.b64decode(text)))
        for text, vector in zip(texts, floats, strict=True)
    ]
    assert read == floats
    alone = [vectors_of(served, case("c37b") | {"input": text})[0] for text in case("c37b")["input"]]
    assert alone == floats


def vectors_of(served: Served, body: dict[str, Any]) -> list[Any]:
    status, reply = served.post("/v1/embeddings", body)
    assert status == 200 and [item["index"] for item in reply["data"]] == list(range(len(reply["data"])))
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"]
    return [item["embedding"] for item in reply["data"]]


def test_an_answer_that_reaches_the_end_of_the_context(home: Path) -> None:
    """Case c25."""
    flags = ("--kv-dtype", "int8", "--max-model-len", str(LIMIT), "--kv-memory", "64MiB")
    with serve(home, "smollm2", *flags) as daemon:
        status, reply = daemon.post(CHAT, case("c25"))
        assert status == 200 and reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["total_tokens"] == LIMIT
        assert daemon.post(CHAT, case("c04b"))[0] == 200
        daemon.wait_idle()
