"""Stand-ins for the parts of an engine that need a model: FakeRunner and what it would answer."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from quantd.engine.messages import ModelInfo
from quantd.engine.plan import EntryOutput, Plan, PlanEntry, RequestState, StepOutput
from quantd.engine.pooling import HiddenRow, pool, pooled_rows
from quantd.engine.request import EmbeddingParams, Request, SamplingParams, TokenLogprob

VOCAB_SIZE = 64
HIDDEN_SIZE = 3
FAULTY_TOKEN = 61
FATAL_TOKEN = 62


def make_info(num_blocks: int = 64, block_size: int = 4, max_model_len: int = 1024) -> ModelInfo:
    return ModelInfo(
        architecture="fake",
        backend="fake",
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        max_model_len=max_model_len,
        weight_bytes=0,
        kv_dtype="int8",
        kv_bytes=num_blocks * block_size,
        kv_bytes_per_token=1,
        block_size=block_size,
        num_blocks=num_blocks,
        load_seconds=0.0,
    )


def make_request(
    name: str, prompt: Sequence[int], salt: str = "", urgent: bool = False, **sampling: object
) -> Request:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request(id=name, prompt=list(prompt), salt=salt, urgent=urgent, sampling=params)


def make_embedding_request(name: str, prompt: Sequence[int], salt: str = "", **params: object) -> Request:
    return Request(
        id=name,
        prompt=list(prompt),
        salt=salt,
        sampling=SamplingParams(max_tokens=0),
        embedding=EmbeddingParams(**params),  # type: ignore[arg-type]
    )


def next_token(token_ids: Sequence[int]) -> int:
    """What FakeRunner draws after these tokens: what any right engine must give."""
    return _draw([hash(tuple(token_ids[: end + 1])) for end in range(len(token_ids))])


def continuation(request: Request, info: ModelInfo) -> tuple[list[int], str]:
    """The output and finish reason of a request that has an engine of its own."""
    sampling, output = request.sampling, list[int]()
    while len(output) != sampling.max_tokens and len(request.prompt) + len(output) < info.max_request_len:
        output.append(next_token([*request.prompt, *output]))
        if output[-1] in sampling.stop_token_ids:
            return output, "stop"
    return output, "length"


def embedding(request: Request) -> npt.NDArray[np.float32]:
    """What FakeRunner's hidden states amount to, of a request that has an engine of its own."""
    prompt, params = request.prompt, request.embedding
    assert params is not None
    states = np.array([_hidden(hash(tuple(prompt[: end + 1]))) for end in range(len(prompt))], np.float64)
    mean = {"mean": states.mean(0), "last": states[-1], "first": states[0]}[params.pooling]
    kept = mean[: params.dimensions]
    return (kept / np.linalg.norm(kept) if params.normalize else kept).astype(np.float32)


class FakeRunner:
    """A model of two layers over a pool of slots, in plain integers.

    The first layer keeps each token, the second a hash of all first-layer values up to it, and the
    drawn token is a hash of all second-layer values: all of them read back through the block table.
    A token's hidden state is made of its second-layer value.
    A wrong table, a stale block or a wrong hit, now or when an earlier token was computed, changes
    the token. Like a real model it writes a layer for the whole batch before it reads any of it. A
    prompt with FAULTY_TOKEN fails its own entry, one with FATAL_TOKEN the step.
    """

    def __init__(self, info: ModelInfo, step_seconds: float = 0.0) -> None:
        self.info = info
        self.step_seconds = step_seconds
        self.plans: list[Plan] = []
        num_slots = info.num_blocks * info.block_size
        self._layers: list[list[int | None]] = [[None] * num_slots, [None] * num_slots]
        self.pool_blocks = FakePoolBlocks(info.block_size, self._layers)

    def run(self, plan: Plan) -> StepOutput:
        return self._run(plan, {})

    def _run(self, plan: Plan, drawn: dict[RequestState, int]) -> StepOutput:
        self.plans.append(plan)
        time.sleep(self.step_seconds)
        if any(FATAL_TOKEN in entry.request.request.prompt for entry in plan.entries):
            raise RuntimeError("the step broke")
        for entry in plan.entries:
            known = entry.request.tokens(entry.start, entry.start + entry.num_tokens)
            self._write(0, entry, [drawn.get(entry.request, 0)] if entry.ahead else known)
        for entry in plan.entries:
            context = self._read(0, entry)
            self._write(1, entry, [hash(tuple(context[: end + 1])) for end in _positions(entry)])
        hidden = [_hidden(value) for entry in plan.entries for value in self._read(1, entry)[entry.start :]]
        pooled = iter([hidden[row] for row in pooled_rows(plan)])
        return StepOutput(tuple(self._answer(entry, pooled) for entry in plan.entries))

    def prepare(self) -> bool:
        return False

    def _answer(self, entry: PlanEntry, pooled: Iterator[HiddenRow]) -> EntryOutput:
        request, context = entry.request.request, self._read(1, entry)
        output = EntryOutput() if request.embedding is None else pool(entry, pooled)
        if FAULTY_TOKEN in request.prompt:
            return EntryOutput(error="a faulty token")
        if request.embedding is not None:
            return output
        drawn = [_draw(context)] if entry.samples else []
        logprobs = (
            [TokenLogprob(token, 0.0) for token in drawn] if request.sampling.logprobs is not None else []
        )
        prompt_logprobs = list[TokenLogprob]()
        if request.sampling.prompt_logprobs is not None:
            first = max(entry.start, entry.request.num_prompt_logprobs) + 1
            last = min(entry.start + entry.num_tokens, len(request.prompt) - 1)
            prompt_logprobs = [
                TokenLogprob(request.prompt[position], float(_draw(context[:position])))
                for position in range(first, last + 1)
            ]
        return EntryOutput(drawn, logprobs, prompt_logprobs)

    def _write(self, layer: int, entry: PlanEntry, values: Sequence[int]) -> None:
        for position, value in zip(_positions(entry), values, strict=True):
            self._layers[layer][self._slot(entry, position)] = value

    def _read(self, layer: int, entry: PlanEntry) -> list[int]:
        values = list[int]()
        for position in range(entry.start + entry.num_tokens):
            value = self._layers[layer][self._slot(entry, position)]
            assert value is not None, f"position {position} of {entry.request.id} was never written"
            values.append(value)
        return values

    def _slot(self, entry: PlanEntry, position: int) -> int:
        size = self.info.block_size
        return entry.blocks[position // size] * size + position % size


class FakePoolBlocks:
    """The blocks of a FakeRunner as bytes: each layer's values."""

    numerics = "fake"

    def __init__(self, block_size: int, layers: list[list[int | None]]) -> None:
        self.num_bytes = 2 * 8 * block_size
        self._block_size = block_size
        self._layers = layers

    def read(self, block: int) -> bytes:
        values = [value for layer in self._layers for value in layer[self._slots(block)]]
        return struct.pack(f"<{len(values)}q", *values)

    def write(self, block: int, data: bytes | memoryview) -> None:
        values = struct.unpack(f"<{2 * self._block_size}q", data)
        self._layers[0][self._slots(block)] = values[: self._block_size]
        self._layers[1][self._slots(block)] = values[self._block_size :]

    def _slots(self, block: int) -> slice:
        return slice(block * self._block_size, (block + 1) * self._block_size)


class AheadFakeRunner(FakeRunner):
    """A FakeRunner that computes a step when it is started, in the order of the starts, as a GPU does."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__(info)
        self.started_ahead: list[bool] = []

    def start(self, plan: Plan, before: FakeStarted | None = None) -> FakeStarted:
        self.started_ahead.append(before is not None)
        return FakeStarted(plan, self._run(plan, {} if before is None else before.drawn))


class FakeStarted:
    """What a step gave."""

    def __init__(self, plan: Plan, output: StepOutput) -> None:
        self._output = output
        pairs = zip(plan.entries, output.entries, strict=True)
        self.drawn = {entry.request: answer.token_ids[0] for entry, answer in pairs if answer.token_ids}

    def result(self) -> StepOutput:
        return self._output


def _positions(entry: PlanEntry) -> range:
    return range(entry.start, entry.start + entry.num_tokens)


def _hidden(value: int) -> HiddenRow:
    return np.array([value % 1009 - 504, value % 101 + 1, value % 13 / 7], np.float32)


def _draw(values: Sequence[int]) -> int:
    return hash(tuple(values)) % (VOCAB_SIZE - 4)
