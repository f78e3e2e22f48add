"""The frames between the daemon and an engine process: msgpack, each behind a 4-byte length (torch-free)."""

from __future__ import annotations

from typing import Literal

import msgspec

from quantd.engine.config import Allowance
from quantd.engine.errors import ContextLengthError, RequestError
from quantd.engine.request import Request, TokenEvent

Wait = Literal["", "seat", "blocks", "tokens"]


class Add(msgspec.Struct, frozen=True, tag="add"):
    """Daemon -> engine: take this request."""

    request: Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Daemon -> engine: drop this request before the next step."""

    request_id: str


class Forget(msgspec.Struct, frozen=True, tag="forget"):
    """Daemon -> engine: let no later request find what the prefix cache has of this prompt."""

    prompt: list[int]
    salt: str = ""


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    """Daemon -> engine: let no later request find the blocks of these keys, here or on disk.

    None: any that is here; what is on disk is then the daemon's to delete.
    """

    keys: list[bytes] | None = None


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Daemon -> engine, before its end: write to disk what is to outlive it, then answer with Saved."""

    seconds: float


class GetStats(msgspec.Struct, frozen=True, tag="get_stats"):
    """Daemon -> engine: answer with Stats. detail: also of each request, and of the pool's parts."""

    detail: bool = False


class Retry(msgspec.Struct, frozen=True, tag="retry"):
    """Daemon -> engine, after Short: memory may be enough now."""

    allowance: Allowance


class Short(msgspec.Struct, frozen=True, tag="short"):
    """Engine -> daemon, in a load: so many bytes are wanting. Retry answers it, or the end of the process.

    urgent, on_gpu: see CapacityError.
    """

    shortage: int
    message: str
    urgent: bool = True
    on_gpu: bool | None = None


class Loading(msgspec.Struct, frozen=True, tag="loading"):
    """Engine -> daemon, before Ready: `done` of `total` bytes of weights are loaded."""

    done: int
    total: int


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Engine -> daemon, once: the model is loaded. Sizes in bytes over all ranks, lengths in tokens."""

    architecture: str
    backend: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    weight_bytes: int
    kv_dtype: str
    kv_bytes: int
    kv_bytes_per_token: int
    block_size: int
    num_blocks: int
    load_seconds: float
    num_ranks: int = 1

    @property
    def on_gpu(self) -> bool:
        """Whether it computes on GPUs."""
        return self.backend.startswith("gpu")

    @property
    def kv_tokens(self) -> int:
        """Tokens that the block pool holds."""
        return self.num_blocks * self.block_size

    @property
    def max_request_len(self) -> int:
        """Tokens, prompt and output, at which a request ends: the context or the pool is full."""
        return min(self.max_model_len, self.kv_tokens)

    def kv_bytes_touched(self, stats: Stats) -> int:
        """Bytes of the block pool that are taken: on a CPU they are as blocks are used, on a GPU at once."""
        if self.on_gpu:
            return self.kv_bytes
        return self.kv_bytes * stats.blocks_touched // self.num_blocks

    def check_request(self, request: Request, context_len: int | None = None) -> None:
        """Raise RequestError, or ContextLengthError, if this model can never serve the request.

        context_len: a bound of the request's own, in tokens.
        """
        prompt_len, limit = len(request.prompt), self.max_request_len
        if context_len is not None:
            limit = min(limit, context_len)
        if not prompt_len:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        if prompt_len + request.draws > limit:
            need = " and needs room for one more" if request.draws else ""
            message = (
                f"the prompt has {prompt_len} tokens{need}, but the {self._limit_name(limit)} is {limit}"
            )
            raise ContextLengthError(prompt_len, limit, message)
        for token_id in (min(request.prompt), max(request.prompt)):
            if not 0 <= token_id < self.vocab_size:
                raise RequestError(f"token id {token_id} is not in 0..{self.vocab_size - 1}", "prompt")
        request.sampling.validate(self.vocab_size)
        if request.embedding is not None:
            if request.draws:
                raise RequestError("an embedding draws no tokens: it goes with max_tokens 0", "max_tokens")
            self._check_dimensions(request.embedding.dimensions)

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is not None and not 1 <= dimensions <= self.hidden_size:
            raise RequestError(
                f"dimensions must be between 1 and the model's {self.hidden_size}, got {dimensions}",
                "dimensions",
            )

    def _limit_name(self, limit: int) -> str:
        if limit == self.max_model_len:
            return "context length"
        return (
            "KV cache (see --kv-memory)" if limit == self.kv_tokens else "context that the request asks for"
        )


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """Engine -> daemon, in place of ModelInfo: why the load stopped."""

    kind: str
    message: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """Engine -> daemon, before the first step with these requests: until then they waited."""

    request_ids: list[str]


class Events(msgspec.Struct, frozen=True, tag="events"):
    """Engine -> daemon: what one step did."""

    events: list[TokenEvent]


class Saved(msgspec.Struct, frozen=True, tag="saved"):
    """Engine -> daemon: what a Save asked for is done, as far as there was time."""


Queue = Literal["held", "waiting", "running"]


class RequestStats(msgspec.Struct, frozen=True, kw_only=True):
    """One request in an engine. queue: held for its grammar, waiting for its turn, or running.

    num_computed: of its num_tokens, prompt and output, those whose keys and values are in the pool.
    """

    id: str
    queue: Queue
    num_tokens: int
    num_computed: int
    num_blocks: int


class PoolMap(msgspec.Struct, frozen=True, kw_only=True):
    """The pool in equal parts of blocks_per_cell blocks, the last maybe of fewer: how many of each part
    requests hold, and how many only the prefix cache does. The others hold nothing.
    """

    blocks_per_cell: int
    held: list[int]
    cached: list[int]


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Engine -> daemon: counters since the start, and the present state.

    waits_for: what the first of those that wait has not got: a seat among those that may run at a time, KV
    blocks, or tokens of the step's budget, which others' prompts take; "" where it has not been looked at.
    blocks_free: hold nothing; blocks_cached: held by no request, but findable by their prefix; the
    others of blocks_total are held by requests. blocks_touched: have ever been used, and so take memory of a
    CPU. live_slots: slots of those that have tokens in them;
    one that several requests share counts once. prompt_tokens: of admitted requests, cached ones
    included. prefix_queries, prefix_hits: prompt tokens looked up in and found by the prefix cache,
    at a request's first admission. disk_hits: tokens whose blocks were read from disk for that. evictions:
    findable blocks given to other tokens. computed_tokens: of all steps, prompts' and drawn ones', and again
    those that a preemption took. requests, pool: only where asked for in detail.
    """

    waits_for: Wait = ""
    num_running: int = 0
    num_waiting: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    blocks_touched: int = 0
    live_slots: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    disk_hits: int = 0
    preemptions: int = 0
    evictions: int = 0
    aborts: int = 0
    computed_tokens: int = 0
    requests: list[RequestStats] = []
    pool: PoolMap | None = None


ToEngine = Add | Abort | Forget | Drop | Save | GetStats | Retry
FromEngine = Loading | Short | ModelInfo | Failed | Started | Events | Saved | Stats
