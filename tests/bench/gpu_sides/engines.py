"""The engine on models of random weights: steps of its runner, and requests through its scheduler.

Steps are of requests that were never prefilled, over a pool of zeros: a token's cost does not hang on what it
is. Requests through the scheduler are real ones, from the prompt to the last token.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from random import Random
from typing import Any

import torch
from sides.report import Row

from gpu_sides.models import first_layers, random_decoder, runner_of, with_bits
from gpu_sides.setup import Measure, Setup, Skipped
from gpu_sides.sizes import ModelShape
from quantd.engine.config import EngineConfig
from quantd.engine.models.decoder import Decoder
from quantd.engine.plan import Plan, PlanEntry, RequestState
from quantd.engine.request import Request, SamplingParams, TokenEvent
from quantd.engine.runner import ModelRunner
from quantd.engine.scheduler import Scheduler
from quantd.engine.stepping import InTurn, Stepping, stepping_of

GOAL = 220.0
_GREEDY = SamplingParams(temperature=0.0)
_PENALIZED = SamplingParams(temperature=0.0, repetition_penalty=1.1, frequency_penalty=0.1)
_FEW_LAYERS = 2  # beside all that are built, for what a layer takes


class Model:
    """A shape's weights, made when they are first asked for, and one runner around them at a time."""

    def __init__(self, setup: Setup, shape: ModelShape) -> None:
        self.setup = setup
        self.shape = shape
        self._made: tuple[object, ModelRunner] | None = None

    @cached_property
    def decoder(self) -> Decoder:
        return random_decoder(self.setup, self.shape, max(self.setup.sizes.contexts))

    def config(self, same_bits: bool = True) -> EngineConfig:
        """Defaults, but that no prompt is found in the cache."""
        name = self.shape.name
        return EngineConfig(model_path=name, backend="gpu", same_bits=same_bits, prefix_caching=False)

    def runner(self, same_bits: bool = True, num_layers: int | None = None) -> ModelRunner:
        """Of all layers or the first few. Its pool holds the largest step, or fills the GPU."""
        key = same_bits, num_layers
        if self._made is None or self._made[0] != key:
            self._made = None
            _free_memory(self.setup)
            decoder = with_bits(self.decoder, same_bits)
            if num_layers is not None:
                decoder = first_layers(decoder, num_layers)
            sizes, config = self.setup.sizes, self.config(same_bits)
            num_blocks = max(sizes.batches) * -(-max(sizes.contexts) // config.block_size)
            self._made = key, runner_of(self.setup, decoder, config, num_blocks)
        return self._made[1]


def _free_memory(setup: Setup) -> None:
    gc.collect()
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()


def small_model(setup: Setup) -> Iterator[Measure]:
    """What the goals name first: one client, the same bits; then steps. Without that promise last."""
    sizes, model = setup.sizes, Model(setup, setup.sizes.small)
    shape, most = model.shape.name, max(sizes.batches)
    yield _named(f"{shape} decode, one client", partial(_one_client, model, stepping_of, GOAL))
    yield _named(f"{shape} decode, one client, steps in turn", partial(_one_client, model, InTurn, None))
    yield _named(f"{shape}, other output alone than together", partial(_other_outputs, model, True))
    for batch, context in _sizes(setup):
        name = f"{shape} decode step, {batch} x {context} tokens"
        yield _named(name, partial(_decode, model, batch, context))
    context = max(sizes.contexts)
    name = f"{shape} decode step with penalties, 1 x {context} tokens"
    yield _named(
        name, partial(_decode, model, 1, context, sampling=_PENALIZED, num_ids=model.shape.vocab_size)
    )
    prefills = [
        (_prefill_name(shape, sizes.prefill, batch, start), batch, start) for batch, start in _prefills(setup)
    ]
    for name, batch, start in prefills:
        yield _named(name, partial(_prefill, model, batch, start, True))
    name = f"{shape}, {most} clients of {min(sizes.contexts) // 2} tokens at once"
    yield _named(name, partial(_many_clients, model, most))
    for name, batch, start in prefills:
        yield _named(f"{name}, --no-same-bits", partial(_prefill, model, batch, start, False))
    name = f"{shape}, other output alone than together, --no-same-bits"
    yield _named(name, partial(_other_outputs, model, False))


def large_model(setup: Setup) -> Iterator[Measure]:
    """Some layers, from which the time of all is computed."""
    sizes, model = setup.sizes, Model(setup, setup.sizes.large)
    shape = model.shape.name
    for batch, context in _sizes(setup):
        plan = partial(_plan, batch, context - 1, 1)
        yield _named(f"{shape} decode step, {batch} x {context} tokens", partial(_scaled, model, plan))
    for batch, start in _prefills(setup):
        plan = partial(_plan, batch, start, sizes.prefill // batch)
        yield _named(_prefill_name(shape, sizes.prefill, batch, start), partial(_scaled, model, plan))


def _named(name: str, run: partial[Row]) -> Measure:
    return Measure(name, partial(run, name))


def _sizes(setup: Setup) -> list[tuple[int, int]]:
    """(requests, tokens of each) of decode steps."""
    return [(batch, context) for context in setup.sizes.contexts for batch in setup.sizes.batches]


def _prefills(setup: Setup) -> list[tuple[int, int]]:
    """(requests, first position) of steps: of one prompt or several, and of a long prompt's end."""
    sizes = setup.sizes
    ends = [(1, context - sizes.prefill) for context in sizes.contexts if context > sizes.prefill]
    return [*((batch, 0) for batch in sizes.batches), *ends]


def _prefill_name(shape: str, num_tokens: int, batch: int, start: int) -> str:
    return f"{shape} prefill step, {batch} x {num_tokens // batch} tokens{f' from {start} on' * bool(start)}"


def _plan(
    batch: int,
    start: int,
    num_tokens: int,
    block_size: int,
    sampling: SamplingParams = _GREEDY,
    num_ids: int = 7,
) -> Plan:
    """A step of requests that have num_tokens from `start` on, each in blocks of its own.

    num_ids: how many distinct tokens they are of, at most.
    """
    stop = start + num_tokens
    num_blocks = -(-stop // block_size)
    prompt = [i % num_ids for i in range(stop)]
    ids = list(range(batch * num_blocks))
    Random(0).shuffle(ids)
    blocks = [ids[i * num_blocks : (i + 1) * num_blocks] for i in range(batch)]
    requests = [Request(id=str(i), prompt=prompt, sampling=sampling) for i in range(batch)]
    entries = zip(requests, blocks, strict=True)
    return Plan(
        tuple(PlanEntry(RequestState(request), start, num_tokens, True, held) for request, held in entries)
    )


def _step_seconds(model: Model, runner: ModelRunner, plan: Plan) -> float:
    num_blocks = sum(len(entry.blocks) for entry in plan.entries)
    if num_blocks > runner.info.num_blocks:
        raise Skipped(f"takes {num_blocks} blocks, and there is room for {runner.info.num_blocks}")

    def step() -> None:
        errors = {entry.error for entry in runner.run(plan).entries} - {None}
        assert not errors, errors

    return model.setup.timer.wall(step)


def _decode(
    model: Model,
    batch: int,
    context: int,
    name: str,
    sampling: SamplingParams = _GREEDY,
    num_ids: int = 7,
) -> Row:
    runner = model.runner()
    plan = _plan(batch, context - 1, 1, runner.info.block_size, sampling, num_ids)
    seconds = _step_seconds(model, runner, plan)
    read = runner.info.weight_bytes + batch * context * runner.info.kv_bytes_per_token
    return Row(name, "tok/s", batch / seconds, None, note=_decode_note(model, seconds, read))


def _decode_note(model: Model, seconds: float, num_bytes: int) -> str:
    """num_bytes: read by a step."""
    share = num_bytes / seconds / model.setup.bandwidth
    return f"{seconds * 1e3:.2f} ms; reads at {share:.0%} of a copy's rate"


def _prefill(model: Model, batch: int, start: int, same_bits: bool, name: str) -> Row:
    runner = model.runner(same_bits)
    plan = _plan(batch, start, model.setup.sizes.prefill // batch, runner.info.block_size)
    seconds = _step_seconds(model, runner, plan)
    return Row(name, "tok/s", plan.num_tokens / seconds, None, note=f"{seconds * 1e3:.1f} ms")


def _scaled(model: Model, plan: partial[Plan], name: str) -> Row:
    """From the times with all built layers and with a few of them."""
    shape = model.shape
    few = min(_FEW_LAYERS, shape.num_layers - 1)
    step = plan(block_size=model.config().block_size)
    long, short = (
        _step_seconds(model, model.runner(num_layers=number), step) for number in (shape.num_layers, few)
    )
    layer = (long - short) / (shape.num_layers - few)
    seconds = long + (shape.stands_for - shape.num_layers) * layer
    note = f"{seconds * 1e3:.1f} ms; {shape.stands_for} layers of {layer * 1e6:.0f} µs, by {shape.num_layers}"
    return Row(name, "tok/s", step.num_tokens / seconds, None, note=note)


def _prompt(model: Model, length: int, seed: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(model.shape.vocab_size) for _ in range(length)]


def _requests(prompts: Sequence[list[int]], num_tokens: int) -> list[Request]:
    """Greedy, and with the log probability of each token, which tells of bits that tokens do not show."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, logprobs=0)
    return [Request(id=str(i), prompt=prompt, sampling=sampling) for i, prompt in enumerate(prompts)]


def _serve(
    model: Model,
    runner: ModelRunner,
    requests: Sequence[Request],
    make_stepping: Callable[[Scheduler, ModelRunner], Stepping] = stepping_of,
) -> Iterator[tuple[float, TokenEvent]]:
    """All requests at once, to their ends: their events and when they came."""
    scheduler = Scheduler(model.config(), runner.info)
    stepping = make_stepping(scheduler, runner)
    for request in requests:
        refused = scheduler.add(request)
        assert refused is None, refused
    while scheduler.has_work:
        plan = stepping.next_plan()
        events = scheduler.update(plan, stepping.run(plan))
        moment = time.perf_counter()
        for event in events:
            assert event.error is None, event
            yield moment, event


def _one_client(model: Model, make_stepping: Callable[..., Stepping], goal: float | None, name: str) -> Row:
    sizes, runner = model.setup.sizes, model.runner()
    requests = _requests([_prompt(model, min(sizes.contexts) // 2, 0)], sizes.engine_tokens)
    seconds = []
    for _ in range(1 + sizes.rounds):
        served = _serve(model, runner, requests, make_stepping)
        moments = [moment for moment, event in served if event.token_ids]
        seconds.append((moments[-1] - moments[0]) / (len(moments) - 1))
    step = statistics.median(seconds[1:])
    note = _decode_note(model, step, runner.info.weight_bytes)
    return Row(name, "tok/s", 1 / step, goal, note=note)


def _many_clients(model: Model, number: int, name: str) -> Row:
    """The second time, when the steps are recorded."""
    sizes, runner = model.setup.sizes, model.runner()
    length = min(sizes.contexts) // 2
    requests = _requests([_prompt(model, length, i) for i in range(number)], sizes.engine_tokens)
    for _ in range(2):
        begun = time.perf_counter()
        moments = [moment for moment, event in _serve(model, runner, requests) if event.token_ids]
    seconds = moments[-1] - begun
    note = f"prefill included; first token after {moments[0] - begun:.2f} s"
    return Row(name, "tok/s", number * sizes.engine_tokens / seconds, None, note=note)


def _other_outputs(model: Model, same_bits: bool, name: str) -> Row:
    """Requests whose tokens, or whose log probabilities in any bit, are others alone than beside the rest."""
    sizes, runner = model.setup.sizes, model.runner(same_bits)
    lengths = [5 + 7 * i % 96 % min(sizes.contexts) for i in range(sizes.same_requests)]
    prompts = [_prompt(model, min(length, min(sizes.contexts) // 2), i) for i, length in enumerate(lengths)]
    requests = _requests(prompts, sizes.same_tokens)
    together = _outputs(model, runner, requests)
    alone: dict[str, list[Any]] = {}
    for request in requests:
        alone |= _outputs(model, runner, [request])
    figure = sum(alone[request.id] != together[request.id] for request in requests)
    unit = f"of {len(requests)} requests"
    return Row(name, unit, figure, model.setup.bits_goal(same_bits), better="less")


def _outputs(model: Model, runner: ModelRunner, requests: Sequence[Request]) -> dict[str, list[Any]]:
    """Tokens and their log probabilities, by request."""
    outputs: dict[str, list[Any]] = {request.id: [] for request in requests}
    for _, event in _serve(model, runner, requests):
        outputs[event.request_id] += zip(event.token_ids, event.logprobs, strict=True)
    return outputs
