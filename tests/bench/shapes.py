"""Scaling: random-weight Llamas of 1B and 3B shape at 4 bit, quantd beside llama.cpp on the same GGUF file.

`python tests/bench/shapes.py [--only 1B]`. Each file is written into a temporary folder (0.7 and 1.8 GB)
and removed again.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from sides.bandwidth import ReadBandwidth
from sides.llama_side import LlamaCpp
from sides.quantd_side import Engine
from sides.report import Row, interleave, print_rows

from quantd.kernels.machine import physical_cores
from quantd.quant.gguf_import import import_gguf

REPO = Path(__file__).parents[2]
# A third of Llama 3's vocabulary: what counts here is the layers.
VOCAB_SIZE = 32000
CONTEXT_LEN = 2048
_BLOCK_LEN = 32
# Weights are uniform in -8..7 times this, which has the standard deviation 0.02 of a fresh model.
_SCALE = 0.0043


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """(rows out, columns in) of each matrix of a layer."""
        kv_size = self.hidden // self.num_heads * self.num_kv_heads
        return {
            "attn_q": (self.hidden, self.hidden),
            "attn_k": (kv_size, self.hidden),
            "attn_v": (kv_size, self.hidden),
            "attn_output": (self.hidden, self.hidden),
            "ffn_gate": (self.intermediate, self.hidden),
            "ffn_up": (self.intermediate, self.hidden),
            "ffn_down": (self.hidden, self.intermediate),
        }


SHAPES = {
    shape.name: shape for shape in (Shape("1B", 16, 2048, 8192, 32, 8), Shape("3B", 28, 3072, 8192, 24, 8))
}


def write_gguf(shape: Shape, file: Path) -> None:
    """A whole model: Q4_0 matrices, a tied embedding among them, norms of ones, a byte-level vocabulary."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(file, "llama", use_temp_file=True)
    writer.add_context_length(CONTEXT_LEN)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_rope_dimension_count(shape.hidden // shape.num_heads)
    _add_tokenizer(writer)
    _add_matrix(writer, "token_embd", (VOCAB_SIZE, shape.hidden), rng)
    _add_ones(writer, "output_norm", shape.hidden)
    for layer in range(shape.num_layers):
        for name, size in shape.matrices.items():
            _add_matrix(writer, f"blk.{layer}.{name}", size, rng)
        for name in ("attn_norm", "ffn_norm"):
            _add_ones(writer, f"blk.{layer}.{name}", shape.hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_matrix(writer: gguf.GGUFWriter, name: str, size: tuple[int, int], rng: np.random.Generator) -> None:
    """Q4_0: in blocks of 32 a float16 scale, then 16 bytes of nibbles (ggml-common.h)."""
    rows, columns = size
    blocks = rng.integers(0, 256, (rows, columns // _BLOCK_LEN, 18), np.uint8)
    blocks[:, :, :2] = np.frombuffer(np.float16(_SCALE).tobytes(), np.uint8)
    writer.add_tensor(f"{name}.weight", blocks.reshape(rows, -1), raw_dtype=Kind.Q4_0)


def _add_ones(writer: gguf.GGUFWriter, name: str, size: int) -> None:
    writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    """GPT-2's 256 bytes, one merge, and fillers; no text is ever tokenized."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printable] + [chr(256 + index) for index in range(68)]
    fillers = [f"[FILL{index}]" for index in range(VOCAB_SIZE - len(letters) - 3)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<s>", "</s>", *letters, "th", *fillers])
    writer.add_token_types([3, 3, *[1] * (len(letters) + 1 + len(fillers))])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def measure(shape: Shape, repeats: int, threads: int) -> Iterator[Row]:
    """Decode and prefill of one shape, and how near decoding comes to what memory can deliver."""
    with tempfile.TemporaryDirectory(prefix="quantd-shape-") as name:
        file, folder = Path(name) / f"random-{shape.name}.gguf", Path(name) / "model"
        write_gguf(shape, file)
        import_gguf(file, folder)
        engine = Engine(folder)
        sides = (engine, LlamaCpp(file, CONTEXT_LEN, threads))
        prompt = _random_ids(512)
        decode = interleave(
            repeats,
            {side.name: lambda side=side: side.decode_rate(prompt[:64], 32) for side in sides},  # type: ignore[misc]
        )
        prefill = interleave(
            repeats,
            {side.name: lambda side=side: side.prefill_rate(prompt) for side in sides},  # type: ignore[misc]
        )
    with ReadBandwidth(threads) as memory:
        read, best = engine.info.weight_bytes * decode["quantd"], memory.measure()
    note = f"{read / 1e9:.1f} of {best / 1e9:.1f} GB/s read, {read / best:.0%}"
    size = f"{shape.name}, {engine.info.weight_bytes / 1e6:.0f} MB of weights"
    yield Row(f"decode, {size}", "tok/s", decode["quantd"], None, decode["llama.cpp"], "llama.cpp", note=note)
    yield Row(
        f"prefill of 512, {shape.name}", "tok/s", prefill["quantd"], None, prefill["llama.cpp"], "llama.cpp"
    )


def _random_ids(length: int) -> list[int]:
    rng = Random(length)
    return [rng.randrange(2, VOCAB_SIZE) for _ in range(length)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=SHAPES, default=list(SHAPES), help="some shapes")
    parser.add_argument("--repeats", type=int, default=3, help="rounds that the medians are of (3)")
    arguments = parser.parse_args()
    home = Path(os.environ.get("QUANTD_TEST_HOME", REPO / "build" / "test-home")).absolute()
    os.environ["XDG_CACHE_HOME"] = str(home / "cache")
    rows = []
    for name in arguments.only:
        print(f"measuring: {name} ...", file=sys.stderr, flush=True)
        rows += measure(SHAPES[name], arguments.repeats, physical_cores())
    print_rows(f"random Llamas at 4 bit (Q4_0), medians of {arguments.repeats}", rows)


if __name__ == "__main__":
    main()
