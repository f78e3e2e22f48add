"""How an engine runs: one frozen record, parsed once, sent whole to the engine process (torch-free)."""

from __future__ import annotations

from typing import Literal

import msgspec

KVDtype = Literal["int8", "fp16", "bf16", "fp32"]
Activations = Literal["auto", "fp32"]
Backend = Literal["auto", "reference", "cpu", "gpu"]


class Allowance(msgspec.Struct, frozen=True, kw_only=True):
    """What of a machine's memory an engine may count on, in bytes.

    promised: of what is free to the CPU, what other engines have not taken yet of their KV caches. limit: of
    all that the engine takes, None for none.
    """

    promised: int = 0
    limit: int | None = None


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one engine process needs to know.

    model_path: a model folder (see quantd.quant.checkpoint). kv_memory: bytes of the block pool, or
    None for what is free. vram_reserve: bytes of a GPU that the pool leaves to other programs. max_model_len:
    tokens of one request, or None for the model's own limit. same_bits: on a GPU too, a request's bits never
    depend on who is beside it, which rules out the vendor's matrix product; None: where that is fast.
    max_num_tokens: the token budget of a step. threads: of each rank, 0 for one a physical core over all
    ranks. kernel_cache: folder of the kernels compiled on this machine, or None for the user's cache folder.
    prefix_folder: where blocks are kept on disk, None for nowhere. disk_cache: bytes of all of them, 0 for
    none; None for what is usual (see quantd.engine.disk_space).
    tp: ranks that share each matrix. split: how layers are spread over stages of tp ranks (see
    quantd.engine.split), "" for one stage. allowance: of memory, at the time of the load.
    """

    model_path: str
    backend: Backend = "auto"
    kv_dtype: KVDtype = "int8"
    activations: Activations = "auto"
    same_bits: bool | None = None
    kv_memory: int | None = None
    vram_reserve: int = 1 << 30
    max_model_len: int | None = None
    max_num_tokens: int = 512
    max_num_requests: int = 64
    block_size: int = 16
    prefix_caching: bool = True
    threads: int = 0
    kernel_cache: str | None = None
    prefix_folder: str | None = None
    disk_cache: int | None = None
    tp: int = 1
    split: str = ""
    allowance: Allowance = Allowance()
