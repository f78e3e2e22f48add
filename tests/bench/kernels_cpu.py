"""How fast the CPU kernels run: bytes read for one row, arithmetic for many, attention over a long cache.

python tests/bench/kernels_cpu.py [--threads N] [--variant native|avx2|portable] [--repeats N]

Prints medians. The read bandwidth beside them is that of a sum over 256 MB with as many threads.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from quantd.kernels.cpu import load_ops
from quantd.kernels.cpu.ops import CpuOps
from quantd.kernels.machine import physical_cores
from quantd.kernels.ops import AttentionInputs, HeadShape
from quantd.kernels.weights import QuantizedWeight
from quantd.quant.kv import FORMATS, KVPool, KVShape

# Matrices of SmolLM2-135M and of an 8B Llama: outputs, inputs, bits.
MATRICES = [
    (49152, 576, 4),
    (3072, 576, 4),
    (576, 1536, 4),
    (14336, 4096, 4),
    (14336, 4096, 8),
    (14336, 4096, 3),
]
ROWS = [1, 4, 16, 64, 512]
HEADS = HeadShape(9, 3, 64)
CONTEXT = 4096


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        run()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def read_bandwidth(threads: int, repeats: int) -> float:
    torch.set_num_threads(threads)
    data = torch.ones(64 << 20)
    return data.nbytes / median_seconds(data.sum, repeats)


def random_weight(n: int, k: int, bits: int) -> QuantizedWeight:
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8)
    scale = (torch.rand(n, k // 32) * 0.01).half().float()
    return QuantizedWeight(codes, scale, (scale * -(2 ** (bits - 1))).half().float(), bits, 32)


def matrix_lines(ops: CpuOps, n: int, k: int, bits: int, repeats: int) -> list[str]:
    packed, lines = ops.pack(random_weight(n, k, bits)), []
    for rows in ROWS:
        x = torch.randn(rows, k)
        seconds = median_seconds(lambda x=x: ops.linear(x, packed), repeats)
        lines.append(
            f"{n:>6} x {k:<5} {bits} bit {rows:>4} rows {seconds * 1e3:9.3f} ms "
            f"{packed.nbytes / seconds / 1e9:7.1f} GB/s {2 * rows * n * k / seconds / 1e9:8.1f} GFLOP/s"
        )
    return lines


def attention_lines(ops: CpuOps, repeats: int) -> list[str]:
    """Over a context of CONTEXT tokens of INT8 keys and values."""
    block_size, num_blocks = 16, CONTEXT // 16
    layer = KVPool.allocate(FORMATS["int8"], KVShape(1, 3, 64, block_size), num_blocks).layers()[0]
    lines = []
    for rows in (1, 512):
        positions = torch.arange(CONTEXT - rows, CONTEXT, dtype=torch.int32)
        inputs = AttentionInputs(
            positions=positions,
            slots=positions,
            query_start=torch.tensor([0, rows], dtype=torch.int32),
            context_len=torch.tensor([CONTEXT], dtype=torch.int32),
            block_tables=torch.arange(num_blocks, dtype=torch.int32)[None],
        )
        q = torch.randn(rows, HEADS.num_heads * HEADS.head_dim)
        seconds = median_seconds(lambda q=q, i=inputs: ops.attention(q, HEADS, i, layer, 0.125), repeats)
        read = CONTEXT * 3 * 2 * (64 + 4)
        lines.append(
            f"attention, {CONTEXT} tokens of 3 heads x 64 {rows:>4} rows {seconds * 1e3:9.3f} ms "
            f"{read / seconds / 1e9:7.1f} GB/s"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--variant", choices=["native", "avx2", "portable"], default="native")
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    ops = load_ops("auto", options.threads, options.variant)
    if ops is None:
        raise SystemExit("the kernels do not compile here")
    torch.manual_seed(0)
    bandwidth = read_bandwidth(options.threads, options.repeats) / 1e9
    print(f"{ops.name}, {options.threads} threads, read bandwidth {bandwidth:.1f} GB/s")
    for n, k, bits in MATRICES:
        print(*matrix_lines(ops, n, k, bits, options.repeats), sep="\n")
    print(*attention_lines(ops, options.repeats), sep="\n")


if __name__ == "__main__":
    main()
