"""Answers that have to keep to a form beside free ones: `python tests/bench/constrained.py`.

Nothing else should run meanwhile. The model is the tests' own, as in peers.py; every form can be kept for as
many tokens as are asked for. A peer's figure is that of free answers in the same round, so a ratio is what a
form costs. First what it costs in a step, the least of many: the draw, and beside it the masks, which are
found on a thread of their own while the forward runs. Last the first token with a schema that nobody has
sent before, and with the same one again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import torch
from sides.quantd_side import Daemon, daemon
from sides.report import Row, interleave, print_rows
from tokenizers import Tokenizer

from quantd.daemon.gbnf import gbnf_to_lark
from quantd.daemon.store import Store
from quantd.engine.grammar import GrammarCompiler
from quantd.engine.plan import RequestState
from quantd.engine.request import Request, SamplingParams
from quantd.engine.sampler import Sampler
from quantd.engine.token_masks import TokenMasks
from quantd.kernels.cpu import load_ops
from quantd.kernels.machine import physical_cores

REPO = Path(__file__).parents[2]
MODEL = "smollm2"
NUM_TOKENS = 96
CLIENTS = (1, 16)
REPEATS = 5
NUM_FIRST = 10

LINES: Mapping[str, Any] = {
    "type": "object",
    "properties": {"lines": {"type": "array", "items": {"type": "string"}, "minItems": 100}},
    "required": ["lines"],
    "additionalProperties": False,
}
GRAMMAR = r"root ::= line+" + "\n" + r'line ::= [A-Z] [a-z ,]* "." "\n"'
FORMS: Mapping[str, Mapping[str, Any]] = {
    "free": {"ignore_eos": True},
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "lines", "schema": LINES}}
    },
    "GBNF": {"grammar": GRAMMAR},
    "tool_choice required": {
        "tools": [{"type": "function", "function": {"name": "write", "parameters": LINES, "strict": True}}],
        "tool_choice": "required",
    },
}


def least(work: Callable[[], object]) -> float:
    """Milliseconds that it takes at least."""
    times = []
    for _ in range(50):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return 1000 * min(times)


def states(folder: Path, grammar: str | None) -> list[RequestState]:
    """Requests in the middle of a line, sampling as is usual."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    output = tokenizer.encode("Once upon a time there was", add_special_tokens=False).ids
    compiler = GrammarCompiler(folder, tokenizer.get_vocab_size())
    made = []
    for seed in range(CLIENTS[-1]):
        sampling = SamplingParams(
            temperature=0.8, top_p=0.95, min_p=0.05, seed=seed, grammar=grammar, stop_token_ids=(2,)
        )
        state = RequestState(Request(id=str(seed), prompt=[5], sampling=sampling), output=list(output))
        state.matcher = None if grammar is None else compiler.matcher(sampling)
        made.append(state)
    return made


def in_a_step(folder: Path) -> list[Row]:
    """Of the GBNF grammar, which allows tokens all over the vocabulary."""
    ops = load_ops()
    assert ops is not None, "there is a compiler"
    free, held = states(folder, None), states(folder, gbnf_to_lark(GRAMMAR, "grammar"))
    vocab_size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    logits = 3 * torch.randn(len(held), vocab_size, generator=torch.Generator().manual_seed(0))
    finder, sampler = TokenMasks(vocab_size), Sampler(ops.shortlists)
    masks = finder.start(held).result()
    assert not masks.errors, masks.errors
    draw = least(lambda: sampler.sample(logits, held, masks))
    draw_free = least(lambda: sampler.sample(logits, free))
    found = least(lambda: finder.start(held).result())
    return [
        Row(f"GBNF, draw of {len(held)} in a step", "ms", draw, None, draw_free, "free", better="less"),
        Row(f"GBNF, masks of {len(held)}, beside the forward", "ms", found, None, better="less"),
    ]


class Clients:
    """Connections to a daemon's chat."""

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http
        self._numbers = itertools.count()

    async def rate(self, num_clients: int, form: Mapping[str, Any]) -> float:
        """Tokens a second of all, from the first token of each to the last of them."""
        begun = time.perf_counter()
        answers = [self._answer(NUM_TOKENS, form) for _ in range(num_clients)]
        spans = await asyncio.gather(*answers)
        if num_clients == 1:
            ((first, last, count),) = spans
            return (count - 1) / (last - first)
        return sum(count for *_, count in spans) / (max(last for _, last, _ in spans) - begun)

    async def first_token(self, form: Mapping[str, Any]) -> float:
        """Seconds until it comes."""
        begun = time.perf_counter()
        first, *_ = await self._answer(2, form)
        return first - begun

    async def _answer(self, num_tokens: int, form: Mapping[str, Any]) -> tuple[float, float, int]:
        """When its first and its last token came, and how many there were."""
        question = f"({next(self._numbers)}) Tell a long story about a fox, a river and a house of stone."
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": num_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | form
        moments, count = [], 0
        async with self._http.post("/v1/chat/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {") and b'"role"' not in line:
                    moments.append(time.perf_counter())
                    if b'"completion_tokens":' in line:
                        count = int(line.split(b'"completion_tokens":')[1].split(b",")[0])
        assert count == num_tokens, (count, form)
        return moments[0], moments[-2], count


def renamed(number: int) -> Mapping[str, Any]:
    """A schema that nobody has sent, of the size that tools of an agent have."""
    names = [f"field_{number}_{i}" for i in range(30)]
    kinds: list[Mapping[str, Any]] = [
        {"type": "string", "maxLength": 80},
        {"type": "integer", "minimum": 0, "maximum": 9999},
        {"enum": ["red", "green", "blue"]},
    ]
    properties = {name: kinds[i % 3] for i, name in enumerate(names)}
    schema = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


async def first_tokens(clients: Clients) -> dict[str, float]:
    """Medians in milliseconds: of free answers, of schemas that are new, and of the same again."""
    seen: dict[str, list[float]] = {"free": [], "new": [], "known": []}
    for number in range(NUM_FIRST):
        schema = renamed(number)
        for name, form in (("free", {}), ("new", schema), ("known", schema)):
            seen[name].append(1000 * await clients.first_token(form))
    # The very first starts the process that tries grammars.
    return {name: statistics.median(values) for name, values in seen.items()} | {"very first": seen["new"][0]}


def measure(served: Daemon) -> list[Row]:
    with asyncio.Runner() as runner:

        async def connect() -> aiohttp.ClientSession:
            assert isinstance(served.client.address, Path)
            connector = aiohttp.UnixConnector(str(served.client.address), limit=0)
            return aiohttp.ClientSession("http://localhost", connector=connector)

        http = runner.run(connect())
        clients = Clients(http)
        first = runner.run(first_tokens(clients))

        def run(num_clients: int, form: Mapping[str, Any]) -> Callable[[], float]:
            return lambda: runner.run(clients.rate(num_clients, form))

        runs = {f"{name}, {n}": run(n, form) for n in CLIENTS for name, form in FORMS.items()}
        for rate in runs.values():
            rate()
        rates = interleave(REPEATS, runs)
        runner.run(http.close())
    note = (
        f"free {first['free']:.0f} ms; the very first, with a process to start: {first['very first']:.0f} ms"
    )
    return [
        *(
            Row(f"{name}, {n} clients", "tok/s", rates[f"{name}, {n}"], None, rates[f"free, {n}"], "free")
            for n in CLIENTS
            for name in FORMS
            if name != "free"
        ),
        Row("first token, a schema of 30 fields, new", "ms", first["new"], None, better="less", note=note),
        Row("the same again", "ms", first["known"], None, better="less"),
    ]


def main() -> None:
    home = Path(os.environ.get("QUANTD_TEST_HOME", REPO / "build" / "test-home")).absolute()
    os.environ |= {"QUANTD_HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    rows = in_a_step(Store(home / "models").pull(MODEL).path)
    with daemon(MODEL) as served:
        rows += measure(served)
    print_rows(f"{MODEL}, {physical_cores()} cores, medians of {REPEATS}", rows)


if __name__ == "__main__":
    main()
