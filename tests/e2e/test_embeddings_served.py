"""Embeddings of a small real model through the daemon, by the official SDK."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from test_daemon import Served, serve
from waiting import until

from quantd.daemon.store import Store

PATH = "/v1/embeddings"
Vectors = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def served(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("home")
    Store(home / "models").import_path(smollm2, "smollm2")
    with serve(home, "smollm2", "--kv-memory", "64MiB") as daemon:
        yield daemon


def embed(served: Served, inputs: Sequence[str] | Sequence[list[int]], **options: object) -> Vectors:
    with served.client() as client:
        reply = client.embeddings.create(model="smollm2", input=inputs, **options)
    assert [entry.index for entry in reply.data] == list(range(len(inputs)))
    return np.array([entry.embedding for entry in reply.data], np.float32)


def test_what_means_alike_lies_together(served: Served) -> None:
    """A model for text, not for embeddings: the nearest is right, by how much is not asked."""
    pairs = [
        ("The cat is sleeping on the warm sofa.", "A kitten naps on the couch."),
        ("How do I sort a list in Python?", "Sorting a list of numbers in Python code"),
        ("The stock market fell sharply today.", "Share prices dropped a lot this morning."),
        ("Boil the pasta in salted water for ten minutes.", "Cook the spaghetti until it is soft."),
    ]
    left, right = (embed(served, side) for side in zip(*pairs, strict=True))
    # What all texts have in common says nothing of them.
    common = np.concatenate([left, right]).mean(0)
    assert ((left - common) @ (right - common).T).argmax(1).tolist() == [0, 1, 2, 3]


def test_vectors_have_length_one_and_both_encodings_are_the_same_bits(served: Served) -> None:
    texts = ["one", "two words", "and a few more words than that"]
    packed, plain = embed(served, texts), embed(served, texts, encoding_format="float")
    assert packed.shape == (3, 576) and np.array_equal(packed, plain)
    np.testing.assert_allclose(np.linalg.norm(packed, axis=1), 1, atol=1e-6)
    short = embed(served, texts, dimensions=64)
    kept = packed[:, :64]
    np.testing.assert_allclose(short, kept / np.linalg.norm(kept, axis=1, keepdims=True), atol=1e-6)


def test_a_text_has_the_same_bits_alone_among_many_and_beside_a_chat(served: Served) -> None:
    texts = [f"Text number {i}: " + "some words and more. " * (i % 7) for i in range(150)]
    alone = np.concatenate([embed(served, [text]) for text in texts[::50]])
    with served.client() as client:
        stream = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "Tell me of the sea."}],
            max_tokens=60,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(stream)
        together = embed(served, texts)
        assert sum(1 for _ in stream) > 10
    assert np.array_equal(together[::50], alone)


def test_leaving_frees_everything(served: Served) -> None:
    served.wait_idle()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(str(served.path))
    body = json.dumps({"input": ["some words and more. " * 50] * 500}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: any\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    until(lambda: served.stats()["num_running"] > 0, "texts run")
    connection.close()
    served.wait_idle()
    assert served.stats()["prompt_tokens"] < 500 * 200


def test_an_overlong_text_is_refused_with_both_numbers(served: Served) -> None:
    status, reply = served.post(PATH, {"input": ["short", "word " * 9000]})
    assert status == 400 and reply["error"]["code"] == "context_length_exceeded"
    assert reply["error"]["n_prompt_tokens"] > reply["error"]["n_ctx"] > 0
    assert str(reply["error"]["n_ctx"]) in reply["error"]["message"]
