"""quantd beside llama.cpp and transformers on SmolLM2-135M Q4_1: `python tests/bench/peers.py`, `make bench`.

Every figure is the median of interleaved runs. The model is the tests' own ($QUANTD_TEST_HOME, else
build/test-home), fetched by the first run that needs it. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import TypeAlias

from sides.bandwidth import ReadBandwidth
from sides.llama_server_side import llama_server
from sides.llama_side import LlamaCpp, first_token_seconds
from sides.quantd_side import Engine, daemon, perplexity, start_engine
from sides.report import Row, interleave, print_rows
from sides.transformers_side import Transformers
from tokenizers import Tokenizer

from quantd.daemon.bench.loads import Load, make_prompts, shared_prefix_loads
from quantd.daemon.bench.results import Result
from quantd.daemon.store import Store
from quantd.engine.messages import ModelInfo
from quantd.kernels.machine import physical_cores

REPO = Path(__file__).parents[2]
MODEL = "smollm2"
VOCAB_SIZE = 49152
WINDOW_LEN = 1024

# llama-server -np 16 on two AVX2 cores (read bandwidth 35.6 GB/s), with the same model and loads: what a
# run without --llama-server is held against. llama-cpp-python has no such server: its own answers one
# request after another, which the figures of a queue stand for.
LLAMA_SERVER_RATES = {"one": 90.0, "sixteen": 136.0, "shared": 10.6}


ServerRate: TypeAlias = Callable[[Load, ModelInfo], float | None]


@dataclass(frozen=True)
class Setting:
    """What the sections measure with. text: for the perplexity; None for one that every machine has."""

    folder: Path
    file: Path
    repeats: int
    threads: int
    text: Path | None
    num_windows: int
    llama_server: Path | None

    def llama(self, context_len: int, quantized_cache: bool = False) -> LlamaCpp:
        return LlamaCpp(self.file, context_len, self.threads, quantized_cache)

    @contextmanager
    def server_rates(self, measure: Callable[[Result], float | None]) -> Iterator[ServerRate]:
        """What gives llama-server's rate for a load: measured now, where there is one."""
        if self.llama_server is None:
            yield lambda load, info: None
            return
        with llama_server(self.llama_server, self.file, self.threads) as server:
            yield lambda load, info: measure(server.run(load, info))


def random_ids(length: int) -> list[int]:
    """Of ordinary tokens, the same in every run."""
    rng = Random(length)
    return [rng.randrange(10, VOCAB_SIZE) for _ in range(length)]


def alone(setting: Setting) -> Iterator[Row]:
    """Decode and prefill of one request, without processes or sockets."""
    sides = (Engine(setting.folder), setting.llama(2048), Transformers(setting.file, setting.threads))
    context, prompt = random_ids(64), random_ids(512)
    rates = interleave(
        setting.repeats,
        {side.name: lambda side=side: side.decode_rate(context, 128) for side in sides},  # type: ignore[misc]
    )
    yield _beside_llama("decode, one client, engine alone", 2.0, rates)
    rates = interleave(
        setting.repeats,
        {side.name: lambda side=side: side.prefill_rate(prompt) for side in sides},  # type: ignore[misc]
    )
    yield _beside_llama("prefill of 512 tokens", 3.5, rates)


def _beside_llama(measure: str, goal: float, rates: dict[str, float], peer_name: str = "llama.cpp") -> Row:
    note = f"transformers fp32: {rates['transformers']:.1f}" if "transformers" in rates else ""
    return Row(measure, "tok/s", rates["quantd"], goal, rates["llama.cpp"], peer_name, note=note)


def streamed(setting: Setting) -> Iterator[Row]:
    """Decode of one client over the daemon's Unix socket."""
    load = Load(kind="decode", prompt_len=64, output_len=129)
    llama, context = setting.llama(2048), random_ids(64)
    with daemon(MODEL) as served, setting.server_rates(lambda result: result.decode_rate) as server:
        rates = interleave(
            setting.repeats,
            {
                "quantd": lambda: served.run(load).decode_rate or 0.0,
                "llama.cpp": lambda: llama.decode_rate(context, 128),
                "server": lambda: server(load, served.info) or LLAMA_SERVER_RATES["one"],
            },
        )
    note = f"llama.cpp in process: {rates['llama.cpp']:.1f}"
    yield _beside_server(setting, "decode, one client, through the daemon", 2.0, "quantd", rates, note)


def sixteen(setting: Setting) -> Iterator[Row]:
    """Sixteen clients at once."""
    load = Load(kind="concurrency", num_clients=16, prompt_len=63, output_len=96)
    _, prompts = make_prompts(load, VOCAB_SIZE, Random(0))
    llama = setting.llama(2048)
    with daemon(MODEL) as served, setting.server_rates(lambda result: result.output_rate) as server:
        rates = interleave(
            setting.repeats,
            {
                "quantd": lambda: served.run(load).output_rate,
                # In a queue four requests have the rate of sixteen.
                "llama.cpp": lambda: llama.queue_rate(prompts[:4], load.output_len),
                "server": lambda: server(load, served.info) or LLAMA_SERVER_RATES["sixteen"],
            },
        )
    measure = "16 clients, 63 tokens in, 96 out, through the daemon"
    note = f"llama.cpp, a queue: {rates['llama.cpp']:.1f}"
    yield _beside_server(setting, measure, 4.0, "quantd", rates, note)


def shared(setting: Setting) -> Iterator[Row]:
    """Eight clients that share a prefix, which one request before them, or none, brought into the cache."""
    cold, cached = shared_prefix_loads(shared_len=700, prompt_len=63, output_len=32, num_clients=8)
    _, prompts = make_prompts(cold, VOCAB_SIZE, Random(0))
    llama = setting.llama(2048)
    with daemon(MODEL) as served, setting.server_rates(lambda result: result.output_rate) as server:
        rates = interleave(
            setting.repeats,
            {
                "cold": lambda: served.run(cold).output_rate,
                "cached": lambda: served.run(cached).output_rate,
                "llama.cpp": lambda: llama.queue_rate(prompts, cold.output_len),
                "server": lambda: server(cached, served.info) or LLAMA_SERVER_RATES["shared"],
                "server, cold": lambda: server(cold, served.info) or LLAMA_SERVER_RATES["shared"],
            },
        )
    note = f"llama.cpp, a queue that keeps the prefix: {rates['llama.cpp']:.1f}"
    for name, server_name in (("cold", "server, cold"), ("cached", "server")):
        measure = f"8 clients sharing a 700-token prefix, {name}, 32 out"
        yield _beside_server(setting, measure, 15.0, name, rates | {"server": rates[server_name]}, note)


def _beside_server(
    setting: Setting, measure: str, goal: float, name: str, rates: dict[str, float], note: str
) -> Row:
    peer = "llama-server -np 16" + ("" if setting.llama_server else ", quoted from a faster machine")
    return Row(measure, "tok/s", rates[name], goal, rates["server"], peer, note=note)


def context(setting: Setting) -> Iterator[Row]:
    """Decode behind a long context with a quantized cache."""
    prompt = random_ids(4000)
    sides = (Engine(setting.folder), setting.llama(4352, quantized_cache=True))
    rates = interleave(
        setting.repeats,
        {side.name: lambda side=side: side.decode_rate(prompt, 64) for side in sides},  # type: ignore[misc]
    )
    yield _beside_llama("decode at 4000 tokens of context", 2.0, rates, "llama.cpp, KV q8_0, flash attention")


def bandwidth(setting: Setting) -> Iterator[Row]:
    """How much of what memory can deliver the weights take while decoding."""
    engine, prompt = Engine(setting.folder), random_ids(64)
    with ReadBandwidth(setting.threads) as memory:
        runs = {"decode": lambda: engine.decode_rate(prompt, 128), "memory": memory.measure}
        rates = interleave(setting.repeats, runs)
    # The output matrix is the embedding, so a step reads every weight once.
    read = engine.info.weight_bytes * rates["decode"]
    note = f"{read / 1e9:.1f} of {rates['memory'] / 1e9:.1f} GB/s"
    yield Row("share of read bandwidth while decoding", "%", 100 * read / rates["memory"], 65, note=note)


def start(setting: Setting) -> Iterator[Row]:
    """A fresh engine process: its time to the first token, and its memory."""
    prompt = random_ids(512)
    start_engine(setting.folder, prompt, 1)  # kernels are compiled and the file is in the page cache
    first = interleave(
        setting.repeats,
        {
            "quantd": lambda: start_engine(setting.folder, prompt[:16], 1).first_token,
            "llama.cpp": lambda: first_token_seconds(setting.file, prompt[:16], setting.threads),
        },
    )
    note = f"llama.cpp, in a process that runs: {first['llama.cpp']:.2f} s"
    yield Row("load to first token", "s", first["quantd"], 3.0, better="less", note=note)
    fresh = [start_engine(setting.folder, prompt, 64) for _ in range(setting.repeats)]
    over = statistics.median(one.resident - one.weights - one.kv_written for one in fresh)
    note = f"of {statistics.median(one.resident for one in fresh) / 1e6:.0f} MB resident"
    yield Row("engine memory over weights and KV written", "MB", over / 1e6, 400, better="less", note=note)


def quality(setting: Setting) -> Iterator[Row]:
    """What rounding activations and the cache to INT8 costs."""
    exact = Engine(setting.folder, activations="fp32", kv_dtype="fp32")
    rounded = Engine(setting.folder)
    windows = list(_windows(setting))
    before, after = (perplexity(engine, windows) for engine in (exact, rounded))
    note = f"{before:.4f} to {after:.4f} over {len(windows)} x {WINDOW_LEN} tokens"
    change = 100 * abs(after / before - 1)
    yield Row("perplexity change by INT8 activations and KV", "%", change, 0.5, better="less", note=note)


def _windows(setting: Setting) -> Iterator[list[int]]:
    """The first windows of the text's ids, without overlap."""
    text = "\n".join(topics.values()) if setting.text is None else setting.text.read_text("utf-8")
    tokenizer = Tokenizer.from_file(str(setting.folder / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for start in range(0, min(len(ids), setting.num_windows * WINDOW_LEN) - WINDOW_LEN + 1, WINDOW_LEN):
        yield ids[start : start + WINDOW_LEN]


SECTIONS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    section.__name__: section
    for section in (alone, streamed, sixteen, shared, context, bandwidth, start, quality)
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="some sections")
    parser.add_argument("--repeats", type=int, default=5, help="rounds that the medians are of (5)")
    parser.add_argument("--text", type=Path, help="text for the perplexity (Python's documentation)")
    parser.add_argument("--llama-server", type=Path, help="a llama-server binary to measure beside")
    parser.add_argument("--windows", type=int, default=16, help="windows of 1024 tokens of it (16)")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    home = Path(os.environ.get("QUANTD_TEST_HOME", REPO / "build" / "test-home")).absolute()
    os.environ |= {"QUANTD_HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    folder = Store(home / "models").pull(MODEL).path
    (file,) = folder.glob("*.gguf")
    threads = physical_cores()
    setting = Setting(
        folder=folder,
        file=file,
        repeats=arguments.repeats,
        threads=threads,
        text=arguments.text,
        num_windows=arguments.windows,
        llama_server=arguments.llama_server,
    )
    rows: list[Row] = []
    try:
        for name in arguments.only:
            print(f"measuring: {name} ...", file=sys.stderr, flush=True)
            rows += SECTIONS[name](setting)
    finally:
        # Also what was measured before something broke, for it took minutes.
        print_rows(f"{file.stem}, {threads} threads, medians of {setting.repeats}", rows)


if __name__ == "__main__":
    main()
