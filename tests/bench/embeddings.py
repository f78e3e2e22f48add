"""Embeddings through the daemon: `python tests/bench/embeddings.py`. Nothing else should run meanwhile.

The model is the tests' own, as in peers.py. Beside it the prefill of an engine alone, the most that texts of
so many tokens could have, and transformers, 32 texts at a time with padding.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from random import Random

from sides.quantd_side import Daemon, Engine, daemon
from sides.report import Row, interleave, print_rows
from sides.transformers_side import Transformers
from tokenizers import Tokenizer

from quantd.daemon.store import Store
from quantd.kernels.machine import physical_cores

REPO = Path(__file__).parents[2]
MODEL = "smollm2"
NUM_TEXTS = 256
REPEATS = 5
WORDS = (
    "the",
    "a",
    "of",
    "in",
    "quick",
    "river",
    "stone",
    "house",
    "walks",
    "sings",
    "over",
    "red",
    "small",
    "keeps",
)


def texts() -> list[str]:
    """The same in every run; 8 to 24 words each."""
    rng = Random(0)
    return [" ".join(rng.choices(WORDS, k=rng.randint(8, 24))) for _ in range(NUM_TEXTS)]


def embed(served: Daemon, inputs: list[str]) -> int:
    """Tokens of them all."""
    body = {"model": served.model, "input": inputs, "encoding_format": "base64"}
    return int(served.client.post("/v1/embeddings", body)["usage"]["prompt_tokens"])


def together(served: Daemon) -> float:
    """Texts a second of one request with all of them."""
    inputs, begun = texts(), time.perf_counter()
    embed(served, inputs)
    return NUM_TEXTS / (time.perf_counter() - begun)


def one_by_one(served: Daemon) -> float:
    """Of one request a text, one after another."""
    inputs, begun = texts()[:64], time.perf_counter()
    for text in inputs:
        embed(served, [text])
    return len(inputs) / (time.perf_counter() - begun)


def main() -> None:
    home = Path(os.environ.get("QUANTD_TEST_HOME", REPO / "build" / "test-home")).absolute()
    os.environ |= {"QUANTD_HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    folder = Store(home / "models").pull(MODEL).path
    (file,) = folder.glob("*.gguf")
    threads = physical_cores()
    engine, peer = Engine(folder), Transformers(file, threads)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [encoded.ids for encoded in tokenizer.encode_batch(texts())]
    with daemon(MODEL) as served:
        length = embed(served, texts()) / NUM_TEXTS
        rates = interleave(
            REPEATS,
            {
                "together": lambda: together(served),
                "one by one": lambda: one_by_one(served),
                "prefill": lambda: engine.prefill_rate(list(range(10, 522))),
                "transformers": lambda: peer.embedding_rate(prompts, batch_size=32),
            },
        )
    note = f"{length:.1f} tokens each; an engine alone prefills {rates['prefill'] / length:.0f} texts' worth"
    rows = [
        Row(
            f"{NUM_TEXTS} texts, one request",
            "texts/s",
            rates["together"],
            None,
            rates["transformers"],
            "transformers fp32",
            note=note,
        ),
        Row("one text a request, one client", "texts/s", rates["one by one"], None),
    ]
    print_rows(f"{file.stem}, {threads} threads, medians of {REPEATS}", rows)


if __name__ == "__main__":
    main()
