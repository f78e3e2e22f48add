"""The one neutral API of the daemon: a request in, a stream of deltas out. No HTTP, no dialect.

`wire/` parses each dialect into these requests and writes the deltas in its own form.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import msgspec

from quantd.daemon.chat_format import ChatFormat, Prompt
from quantd.daemon.constraints import Constraint
from quantd.daemon.embeddings import (
    MOST_AT_ONCE,
    EmbeddingRequest,
    Embeddings,
    embed,
    engine_requests,
    token_ids,
)
from quantd.daemon.errors import NoInfillError, OverloadedError
from quantd.daemon.generation import Choice, Echo, Generation, Head, Usage
from quantd.daemon.infill import InfillPrompt, InfillText, InfillWriter
from quantd.daemon.line_rules import LineRules
from quantd.daemon.loaded_model import LoadedModel
from quantd.daemon.metrics import Metrics
from quantd.daemon.model_files import USUAL_SAMPLING
from quantd.daemon.models import Models
from quantd.daemon.output_parser import OutputParser, PlainOutput
from quantd.daemon.preset import Preset
from quantd.daemon.templates import Message
from quantd.daemon.text import StopStrings
from quantd.daemon.tokenizer import Tokenizer
from quantd.daemon.tool_formats.format import CallRules, read_tools
from quantd.daemon.truncation import shortened
from quantd.engine.errors import ContextLengthError, RequestError
from quantd.engine.request import INT64_MAX, Request, SamplingParams
from quantd.quant.errors import CheckpointError

# Text that takes more than a few milliseconds to be made a prompt leaves the event loop free. A message
# takes a template as long as so many characters take a tokenizer.
_LONG_TEXT = 20_000
_MESSAGE_COST = 100
# Tokens left to an answer in a gap that has no limit of its own.
_INFILL_ROOM = 256

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to answer. sampling: its stop_token_ids are the client's own; the model's are added here.

    open: fields of sampling that the client left open, for which the model has defaults of its own.
    n: choices for each prompt; a seeded request gives choice j the seed plus j. cache_salt: prompts share
    cached prefixes only under the same salt. constraint: what the answer must be. context_len: tokens,
    prompt and answer, that this request may have at most, if fewer than the model's. usual: sampling for
    open fields of models whose authors say nothing of it. keep_alive: seconds that the model is to stay
    in memory afterwards, see KeepAlive. biased_texts: logit biases of all tokens of a text. lines: how lines
    may end the answer. reports_progress: deltas are to tell how far the prompt is computed.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    open: frozenset[str] = frozenset()
    usual: Mapping[str, float] = field(default_factory=lambda: USUAL_SAMPLING)
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    cache_salt: str = ""
    constraint: Constraint | None = None
    context_len: int | None = None
    keep_alive: float | None = None
    biased_texts: Mapping[str, float] = field(default_factory=dict)
    lines: LineRules = field(default_factory=LineRules)
    reports_progress: bool = False


@dataclass(frozen=True)
class ToolChoice:
    """Whether the answer may or must call tools. name: the only one to call; allowed: those that may be."""

    mode: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    allowed: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A conversation to go on with. model None or "default": the one at hand.

    messages, tools: as templates read them, which is OpenAI's form with arguments of calls as objects.
    parallel_tool_calls: whether an answer may call more than once. thinking: whether the model is to
    reason first; None: as it does by itself. template: Jinja to use in place of the model's own. history:
    tokens that the conversation goes on from. continues: the last message is the assistant's, and the answer
    goes on with it. truncate: leave out the oldest turns where all do not fit.
    """

    model: str | None
    messages: Sequence[Message]
    tools: Sequence[dict[str, Any]] | None = None
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    thinking: bool | None = None
    documents: Sequence[dict[str, Any]] | None = None
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    history: Sequence[int] = ()
    continues: bool = False
    truncate: bool = False
    options: Options = Options()


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """Raw prompts to go on with. echo: repeat each prompt before its answer.

    prompts: texts, token ids, or pieces of both that follow each other.
    """

    model: str | None
    prompts: Sequence[str | Sequence[int | str]]
    echo: bool = False
    options: Options = Options()


@dataclass(frozen=True, kw_only=True)
class InfillRequest:
    """A gap between two texts to fill. An empty suffix is one too: the gap is at the end of a file.

    trims_files: where all do not fit, leave out the oldest files, which the client counts on; the text
    around the cursor is never cut.
    """

    model: str | None
    text: InfillText
    trims_files: bool = False
    options: Options = Options()


@dataclass(frozen=True)
class _Prompts:
    """Prompts in tokens. field: of the request, that they were made of.

    echoed: to be repeated before the answers, as sent, None for token ids. num_left_out: files that had no
    room.
    """

    ids: Sequence[list[int]]
    field: str = "messages"
    echoed: Sequence[str | None] | None = None
    num_left_out: int = 0


class Service:
    """Answers requests with models that it loads as needed. max_queue: choices that may be under way."""

    def __init__(self, models: Models, metrics: Metrics, max_queue: int) -> None:
        self.models = models
        self.metrics = metrics
        self._closing = False
        self._max_queue = max_queue
        self._num_choices = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def chat(self, request: ChatRequest) -> Generation:
        """Start to answer a conversation.

        Raises before anything runs: RequestError, ContextLengthError, OverloadedError, and what keeps the
        model from loading.
        """
        with ExitStack() as held:
            started = time.monotonic()
            rules = _call_rules(request)
            model = await self._acquire(request.model, request.options.n, held, request.options.keep_alive)
            loaded = time.monotonic() - started
            chat = _chat_format(model, request)
            prompt = await _chat_prompt(model, chat, request)
            grammar = await _grammar(chat, prompt, rules, request.options.constraint)
            parser = partial(chat.parser, prompt, rules)
            prompts = _Prompts([prompt.ids])
            return self._generate(model, prompts, request.options, held, loaded, parser, grammar)

    async def prompt(self, request: ChatRequest) -> Prompt:
        """The prompt that `chat` would give the model. Raises as `chat`."""
        with ExitStack() as held:
            model = await self._acquire(request.model, 0, held)
            return await _chat_prompt(model, _chat_format(model, request), request)

    async def complete(self, request: CompletionRequest) -> Generation:
        """Start to go on with raw prompts; choice j of prompt i has the index i * n + j. Raises as `chat`."""
        options = request.options
        with ExitStack() as held:
            started = time.monotonic()
            num_choices = options.n * len(request.prompts)
            model = await self._acquire(request.model, num_choices, held, options.keep_alive)
            loaded = time.monotonic() - started
            ids = await _raw_prompts(model.tokenizer, request.prompts)
            texts = [prompt if isinstance(prompt, str) else None for prompt in request.prompts]
            prompts = _Prompts(ids, field="prompt", echoed=texts if request.echo else None)
            return self._generate(model, prompts, options, held, loaded)

    async def infill(self, request: InfillRequest) -> Generation:
        """Start to fill a gap. Raises as `chat`, also where the model knows no prompts for it."""
        with ExitStack() as held:
            started = time.monotonic()
            model = await self._acquire(request.model, request.options.n, held, request.options.keep_alive)
            loaded = time.monotonic() - started
            writer = _infill_writer(model)
            prompt = await _infill_prompt(model, writer, request)
            options = _infill_options(model, writer, request)
            prompts = _Prompts([prompt.ids], field="prompt", num_left_out=prompt.num_left_out)
            return self._generate(model, prompts, options, held, loaded)

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """The vectors of some texts, however many.

        Raises as `chat` before anything runs, also where the model's way to embed is not supported; then
        GenerationError or EngineDiedError.
        """
        with ExitStack() as held:
            started = time.monotonic()
            at_once = min(len(request.inputs), MOST_AT_ONCE, self._max_queue)
            model = await self._acquire(request.model, at_once, held, request.keep_alive)
            loaded = time.monotonic()
            info, params = model.engine.info, model.head.params(request.dimensions, request.normalize)
            size = sum(len(item) for item in request.inputs if isinstance(item, str))
            prompts = await _in_time(size, lambda: token_ids(model.tokenizer, request, info.max_request_len))
            requests = engine_requests(info, uuid.uuid4().hex, prompts, params, request.context_len)
            events = await embed(model.engine, requests, at_once)
            usage = Usage(
                prompt_tokens=sum(map(len, prompts)),
                completion_tokens=0,
                cached_tokens=sum(event.num_cached or 0 for event in events),
                load_seconds=loaded - started,
                prompt_seconds=time.monotonic() - loaded,
            )
            return Embeddings(model.name, [event.embedding or b"" for event in events], usage)

    @asynccontextmanager
    async def model(self, name: str | None) -> AsyncIterator[LoadedModel]:
        """A model, kept in memory for the block. Raises what keeps it from loading."""
        with ExitStack() as held:
            yield await self._acquire(name, 0, held)

    async def load(self, model: str | None, keep_alive: float | None = None) -> None:
        """Have a model in memory, for so many seconds (see KeepAlive). Raises what keeps it from loading."""
        with ExitStack() as held:
            await self._acquire(model, 0, held, keep_alive)

    def refuse_new(self) -> None:
        """Take no more requests; those under way go on."""
        self._closing = True

    async def wait_idle(self) -> None:
        """Return once no request is under way."""
        await self._idle.wait()

    async def _acquire(
        self, name: str | None, num_choices: int, held: ExitStack, keep_alive: float | None = None
    ) -> LoadedModel:
        """The model, held and counted until `held` is closed; it stays in memory for `keep_alive` then."""
        if self._closing:
            raise OverloadedError("the daemon is stopping")
        if num_choices > self._max_queue:
            raise RequestError(
                f"n: {num_choices} answers at once are more than this daemon ever takes, which is "
                f"{self._max_queue} (max_queue)",
                "n",
            )
        if self._num_choices + num_choices > self._max_queue:
            raise OverloadedError(
                f"{self._num_choices} requests are under way and {num_choices} more would pass the limit of "
                f"{self._max_queue} (max_queue); try again later"
            )
        self._count(num_choices)
        held.callback(self._count, -num_choices)
        model = await self.models.acquire(name)
        held.callback(model.release, keep_alive)
        return model

    def _count(self, change: int) -> None:
        self._num_choices += change
        if self._num_choices:
            self._idle.clear()
        else:
            self._idle.set()

    def _generate(
        self,
        model: LoadedModel,
        prompts: _Prompts,
        options: Options,
        held: ExitStack,
        load_seconds: float,
        new_parser: Callable[[], OutputParser] = PlainOutput,
        grammar: str | None = None,
    ) -> Generation:
        """Check every engine request, then start them."""
        options = _completed(options, model.preset)
        generation_id = uuid.uuid4().hex
        stops = StopStrings(options.stop)
        echoed = prompts.echoed
        jobs = []
        for index in range(len(prompts.ids) * options.n):
            place, number = divmod(index, options.n)
            ids = prompts.ids[place]
            request = Request(
                id=f"{generation_id}-{index}",
                prompt=ids,
                sampling=_sampling(options, model, number, echoed is not None, len(ids), grammar),
                salt=options.cache_salt,
                reports_progress=options.reports_progress,
            )
            try:
                model.engine.info.check_request(request, options.context_len)
            except ContextLengthError as error:
                error.param = prompts.field
                raise
            scored = request.sampling.logprobs is not None
            echo = None if echoed is None else Echo(model.tokenizer, ids, echoed[place], scored)
            lines, parser = options.lines.limit(), new_parser()
            choice = Choice(index, model.tokenizer, stops.restarted(), scored, echo, parser, lines)
            jobs.append((request, choice))
        on_close = held.pop_all().close
        head = Head(
            id=generation_id,
            model=model.name,
            num_choices=len(jobs),
            prompt_tokens=sum(map(len, prompts.ids)),
            context_len=_context_len(model, options),
            num_left_out=prompts.num_left_out,
            prompt=prompts.ids[0],
        )
        return Generation(head, model.engine, jobs, options.n, self.metrics, on_close, load_seconds)


def _completed(options: Options, preset: Preset) -> Options:
    """The options with the model's own in what they leave open."""
    sampling = options.sampling
    if sampling.max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=preset.max_tokens)
    return replace(
        options,
        sampling=sampling,
        stop=options.stop or tuple(preset.stop),
        context_len=preset.context_len if options.context_len is None else options.context_len,
    )


def _sampling(
    options: Options, model: LoadedModel, number: int, echo: bool, prompt_len: int, grammar: str | None
) -> SamplingParams:
    """The engine's parameters of a prompt's choice `number`."""
    known = model.sampling_defaults(options.usual)
    defaults: dict[str, Any] = {name: known[name] for name in options.open & known.keys()}
    sampling = msgspec.structs.replace(options.sampling, **defaults)
    vocab_size = model.engine.info.vocab_size
    bias = {
        token_id: bias
        for text, bias in options.biased_texts.items()
        for token_id in model.tokenizer.encode(text)
    }
    ends = tuple(
        end for end in sorted(model.tokenizer.end_ids) if end < vocab_size and not options.ignore_eos
    )
    return msgspec.structs.replace(
        sampling,
        seed=None if sampling.seed is None else _wrap_int64(sampling.seed, number),
        logit_bias=bias | sampling.logit_bias,
        max_tokens=_max_tokens(sampling.max_tokens, options.context_len, prompt_len),
        stop_token_ids=tuple(dict.fromkeys(ends + sampling.stop_token_ids)),
        grammar=grammar,
        prompt_logprobs=sampling.logprobs if echo else None,
    )


def _max_tokens(max_tokens: int | None, context_len: int | None, prompt_len: int) -> int | None:
    """What is left of a context that the request itself bounds; one token where none is left."""
    if context_len is None:
        return max_tokens
    room = max(context_len - prompt_len, 1)
    return room if max_tokens is None else min(max_tokens, room)


def _wrap_int64(seed: int, number: int) -> int:
    """seed + number. One that is no int64 stays as it is, for the engine's check to name it."""
    if not -INT64_MAX - 1 <= seed <= INT64_MAX:
        return seed
    return (seed + number + INT64_MAX + 1) % (2 * (INT64_MAX + 1)) - INT64_MAX - 1


async def _chat_prompt(model: LoadedModel, chat: ChatFormat, request: ChatRequest) -> Prompt:
    messages = model.preset.conversation(request.messages)

    def render(messages: Sequence[Message]) -> Prompt:
        variables, thinking = request.template_variables, request.thinking
        prompt = chat.prompt(
            messages, request.tools, request.documents, variables, thinking, request.continues
        )
        return replace(prompt, ids=_behind(request.history, prompt.ids, model.tokenizer))

    def render_fitting() -> Prompt:
        if not request.truncate:
            return render(messages)
        limit = _context_len(model, request.options)
        return render(shortened(messages, lambda fewer: len(render(fewer).ids) < limit))

    if request.template is not None:
        return await asyncio.to_thread(render_fitting)  # a client's own program may take its time
    sizes = (_MESSAGE_COST + len(message["content"]) for message in messages)
    return await _in_time(sum(sizes), render_fitting)


async def _grammar(
    chat: ChatFormat, prompt: Prompt, rules: CallRules | None, constraint: Constraint | None
) -> str | None:
    """What an answer may be, written beside the event loop, as schemas may be long; None where it is free."""
    if rules is None and constraint is None:
        return None
    return await asyncio.to_thread(chat.grammar, prompt, rules, constraint)


def _call_rules(request: ChatRequest) -> CallRules | None:
    """What the answer may call; None: nothing."""
    tools, choice = read_tools(request.tools or ()), request.tool_choice
    allowed = choice.allowed if choice.name is None else (choice.name,)
    for name in allowed or ():
        if all(tool.name != name for tool in tools):
            raise RequestError(f"tool_choice: there is no tool named {name!r}", "tool_choice")
    called = [tool for tool in tools if allowed is None or tool.name in allowed]
    required = choice.mode == "required"
    if required and not called:
        raise RequestError("tool_choice: required needs tools to choose from", "tool_choice")
    if choice.mode == "none" or not called:
        return None
    parallel = request.parallel_tool_calls and choice.name is None
    return CallRules(called, required, parallel)


def _chat_format(model: LoadedModel, request: ChatRequest) -> ChatFormat:
    if request.template is not None:
        try:
            return ChatFormat(model.tokenizer.chat_template(request.template), model.tokenizer)
        except CheckpointError as error:
            raise RequestError(f"template: {error}; it must be Jinja, not Go", "template") from error
    chat = model.tool_chat if request.tools else model.chat
    if chat is None:
        raise RequestError(f"the model {model.name} has no chat template; use /v1/completions", "model")
    return chat


def _behind(history: Sequence[int], ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The tokens behind others, with the first tokens of a text only there."""
    if not history:
        return ids
    head = tokenizer.head
    return [*history, *(ids[len(head) :] if ids[: len(head)] == head else ids)]


def _context_len(model: LoadedModel, options: Options) -> int:
    """Tokens, prompt and answer, that a request may have."""
    own = _completed(options, model.preset).context_len
    served = model.engine.info.max_request_len
    return served if own is None else min(own, served)


def _infill_writer(model: LoadedModel) -> InfillWriter:
    if model.infill is None:
        raise NoInfillError(
            f"the model {model.name} has not learnt to fill gaps: its tokenizer lacks the tokens for a "
            "prefix and a suffix; send a prompt without a suffix, or name another model",
            "suffix",
        )
    return model.infill


async def _infill_prompt(model: LoadedModel, writer: InfillWriter, request: InfillRequest) -> InfillPrompt:
    text, limit = request.text, _infill_limit(model, request.options)

    def write() -> InfillPrompt:
        return writer.fitted(text, limit) if request.trims_files else writer.prompt(text)

    sizes = (len(file.text) for file in text.files)
    return await _in_time(sum(sizes, len(text.prefix) + len(text.suffix)), write)


def _infill_limit(model: LoadedModel, options: Options) -> int:
    """Tokens of a prompt that leave room for its answer."""
    context_len = _context_len(model, options)
    answer_len = options.sampling.max_tokens or _INFILL_ROOM
    return context_len - min(answer_len, context_len // 2)


def _infill_options(model: LoadedModel, writer: InfillWriter, request: InfillRequest) -> Options:
    """With the family's ends of an answer."""
    options = request.options
    vocab_size = model.engine.info.vocab_size
    ends = tuple(end for end in writer.stop_ids if end < vocab_size and not options.ignore_eos)
    sampling = msgspec.structs.replace(
        options.sampling, stop_token_ids=options.sampling.stop_token_ids + ends
    )
    stops = writer.format.stops if request.text.files else ()
    return replace(options, sampling=sampling, stop=options.stop + stops)


async def _raw_prompts(tokenizer: Tokenizer, prompts: Sequence[str | Sequence[int | str]]) -> list[list[int]]:
    pieces = [[prompt] if isinstance(prompt, str) else prompt for prompt in prompts]
    size = sum(len(item) for items in pieces for item in items if isinstance(item, str))
    return await _in_time(size, lambda: [_raw_prompt(tokenizer, items) for items in pieces])


def _raw_prompt(tokenizer: Tokenizer, pieces: Sequence[int | str]) -> list[int]:
    """Pieces in tokens. What goes before a raw text goes before those that begin with one."""
    ids: list[int] = []
    for place, item in enumerate(pieces):
        ids += tokenizer.encode(item, raw=place == 0) if isinstance(item, str) else (item,)
    return ids


async def _in_time(num_characters: int, work: Callable[[], Result]) -> Result:
    """The result of work on so much text; what takes long leaves the event loop to the others."""
    return work() if num_characters < _LONG_TEXT else await asyncio.to_thread(work)
