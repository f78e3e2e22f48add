"""The one neutral API of the daemon: a request in, a stream of deltas out. No HTTP, no dialect.

`wire/` parses each dialect into `requests` and writes the deltas in its own form.
"""

from __future__ import annotations

import asyncio
import copy
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from quantd.daemon.access.scope import Client
from quantd.daemon.activity import Activity, RequestRecord
from quantd.daemon.admission import Admission
from quantd.daemon.chat_format import AnswerRules, ChatFormat, Prompt
from quantd.daemon.choice import Choice, Echo
from quantd.daemon.constraints import Constraint
from quantd.daemon.deltas import Head, Usage
from quantd.daemon.embeddings import (
    MOST_AT_ONCE,
    EmbeddingRequest,
    Embeddings,
    embed,
    engine_requests,
    token_ids,
)
from quantd.daemon.engine_options import completed, context_len_of, engine_sampling
from quantd.daemon.generation import Generation
from quantd.daemon.grammar_check import GrammarChecker
from quantd.daemon.loaded_model import LoadedModel, ModelEntry
from quantd.daemon.metrics import Metrics
from quantd.daemon.models import Models
from quantd.daemon.output_parser import OutputParser, PlainOutput
from quantd.daemon.prompts import (
    call_rules,
    chat_format,
    chat_prompt,
    in_time,
    infill_options,
    infill_prompt,
    infill_writer_of,
    raw_prompts,
)
from quantd.daemon.relay import Relay
from quantd.daemon.requests import ChatRequest, CompletionRequest, InfillRequest, Options
from quantd.daemon.text import StopStrings
from quantd.daemon.waits import loading
from quantd.engine.errors import ContextLengthError, RequestError
from quantd.engine.request import Request


@dataclass(frozen=True)
class _Prompts:
    """Prompts in tokens. field: of the request, that they were made of.

    echoed: to be repeated before the answers, as sent, None for token ids. num_left_out: files that had no
    room. urgent: answers are wanted before others.
    """

    ids: Sequence[list[int]]
    field: str = "messages"
    echoed: Sequence[str | None] | None = None
    num_left_out: int = 0
    urgent: bool = False


class _Acquired(NamedTuple):
    """A model, the client's request that wants it, and how long that waited for it."""

    model: LoadedModel
    record: RequestRecord
    load_seconds: float


class Service:
    """Answers requests with models that it loads as needed.

    max_queue, max_client_queue: choices that may be under way, of all clients and of one.
    """

    def __init__(
        self, models: Models, metrics: Metrics, max_queue: int, max_client_queue: int | None = None
    ) -> None:
        self.models = models
        self.metrics = metrics
        self.activity = Activity()
        self.activity.on_end.append(metrics.exchange)
        self._admission = Admission(max_queue, max_client_queue)
        self._client = ""
        self._checker = GrammarChecker()
        models.on_gone = lambda entry: self._checker.forget(Path(entry.config.model_path))

    def of(self, client: Client) -> Service:
        """The same service as one client has it, whose prompts share nothing with those of others."""
        own = copy.copy(self)
        own._client = client.id
        return own

    def forget(self, model: LoadedModel, prompt: Sequence[int]) -> None:
        """Take a prompt of this client out of a model's prefix cache."""
        model.engine.forget(prompt, self._salt())

    async def close(self) -> None:
        """End what helps with requests, of which none is under way any more."""
        await self._checker.close()

    async def chat(self, request: ChatRequest) -> Generation:
        """Start to answer a conversation.

        Raises before anything runs: RequestError, ContextLengthError, OverloadedError, and what keeps the
        model from loading.
        """
        with ExitStack() as held:
            rules = AnswerRules(call_rules(request), request.options.constraint)
            acquired = await self._acquire(request.model, request.options.n, held, request.options.keep_alive)
            model = acquired.model
            chat = await chat_format(model, request)
            prompt = await chat_prompt(model, chat, request)
            grammar = await self._chat_grammar(model, chat, prompt, rules)
            parser = partial(chat.parser, prompt, rules)
            prompts, options = _Prompts([prompt.ids]), _with_budget(chat, prompt, request)
            return self._generate(acquired, prompts, options, held, parser, grammar)

    async def prompt(self, request: ChatRequest) -> Prompt:
        """The prompt that `chat` would give the model. Raises as `chat`."""
        with ExitStack() as held:
            model = (await self._acquire(request.model, 0, held)).model
            return await chat_prompt(model, await chat_format(model, request), request)

    async def complete(self, request: CompletionRequest) -> Generation:
        """Start to go on with raw prompts; choice j of prompt i has the index i * n + j. Raises as `chat`."""
        options = request.options
        with ExitStack() as held:
            num_choices = options.n * len(request.prompts)
            acquired = await self._acquire(request.model, num_choices, held, options.keep_alive)
            model = acquired.model
            ids = await raw_prompts(model.tokenizer, request.prompts)
            texts = [prompt if isinstance(prompt, str) else None for prompt in request.prompts]
            prompts = _Prompts(ids, field="prompt", echoed=texts if request.echo else None)
            grammar = await self._raw_grammar(model, options.constraint)
            return self._generate(acquired, prompts, options, held, grammar=grammar)

    async def infill(self, request: InfillRequest) -> Generation:
        """Start to fill a gap. Raises as `chat`, also where the model knows no prompts for it."""
        with ExitStack() as held:
            acquired = await self._acquire(request.model, request.options.n, held, request.options.keep_alive)
            model = acquired.model
            writer = infill_writer_of(model)
            prompt = await infill_prompt(model, writer, request)
            options = infill_options(model, writer, request)
            left_out = prompt.num_left_out
            prompts = _Prompts([prompt.ids], field="prompt", num_left_out=left_out, urgent=True)
            grammar = await self._raw_grammar(model, options.constraint)
            return self._generate(acquired, prompts, options, held, grammar=grammar)

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """The vectors of some texts, however many.

        Raises as `chat` before anything runs, also where the model's way to embed is not supported; then
        GenerationError or EngineDiedError.
        """
        with ExitStack() as held:
            at_once = min(len(request.inputs), MOST_AT_ONCE, self._admission.most)
            model, record, load_seconds = await self._acquire(
                request.model, at_once, held, request.keep_alive
            )
            loaded = time.monotonic()
            info, params = model.engine.info, model.head.params(request.dimensions, request.normalize)
            size = sum(len(item) for item in request.inputs if isinstance(item, str))
            prompts = await in_time(size, lambda: token_ids(model.tokenizer, request, info.max_request_len))
            self._keep_prompts(record, model, prompts)
            id, salt = uuid.uuid4().hex, self._salt()
            requests = engine_requests(info, id, prompts, params, request.context_len, salt)
            observer = self.metrics.of(model.name)
            source = Relay(self.models, model, request.keep_alive)
            events = await record.unless_cancelled(embed(source, requests, at_once, record, observer))
            usage = Usage(
                prompt_tokens=sum(map(len, prompts)),
                completion_tokens=0,
                cached_tokens=sum(event.num_cached or 0 for event in events),
                load_seconds=load_seconds,
                prompt_seconds=time.monotonic() - loaded,
            )
            return Embeddings(model.name, [event.embedding or b"" for event in events], usage)

    @asynccontextmanager
    async def model(self, name: str | None) -> AsyncIterator[LoadedModel]:
        """A model, kept in memory for the block. Raises what keeps it from loading."""
        with ExitStack() as held:
            yield (await self._acquire(name, 0, held)).model

    async def load(self, model: str | None, keep_alive: float | None = None) -> None:
        """Have a model in memory, for so many seconds (see KeepAlive). Raises what keeps it from loading."""
        with ExitStack() as held:
            await self._acquire(model, 0, held, keep_alive)

    def refuse_new(self) -> None:
        """Take no more requests; those under way go on."""
        self._admission.refuse_new()

    async def wait_idle(self) -> None:
        """Return once no request is under way."""
        await self._admission.wait_idle()

    async def _acquire(
        self, name: str | None, num_choices: int, held: ExitStack, keep_alive: float | None = None
    ) -> _Acquired:
        """The model, held and counted until `held` is closed; it stays in memory for `keep_alive` then."""
        started = time.monotonic()
        self._admission.enter(self._client, num_choices, held)
        record = self.activity.join(name, self._client)
        held.callback(record.release)

        def wait_for(entry: ModelEntry) -> None:
            record.why = lambda: loading(entry)

        model = await record.unless_cancelled(self.models.acquire(name, wait_for))
        held.callback(model.release, keep_alive)
        record.got_model(model.name)
        return _Acquired(model, record, time.monotonic() - started)

    def _keep_prompts(self, record: RequestRecord, model: LoadedModel, prompts: Sequence[list[int]]) -> None:
        """Keep what the model is given for the log, if that is to have it."""
        if self.activity.keeps_prompts:
            record.prompts += [model.tokenizer.decode(ids, special=True) for ids in prompts]

    def _salt(self, asked: str = "") -> str:
        """What keeps a client's prompts apart in the prefix cache: no id has a zero in it."""
        return f"{self._client}\0{asked}"

    async def _chat_grammar(
        self, model: LoadedModel, chat: ChatFormat, prompt: Prompt, rules: AnswerRules
    ) -> str | None:
        """What an answer of a chat may be; None where it is free.

        Where schemas of tools cannot be enforced, those that no client insists on give way.
        """
        if rules == AnswerRules():
            return None
        param = "tools" if rules.form is None else rules.form.param
        try:
            return await self._checked(model, partial(chat.grammar, prompt, rules), param)
        except RequestError:
            if rules.calls is None or all(tool.strict for tool in rules.calls.tools):
                raise
        loose = replace(rules, calls=rules.calls.loosened())
        return await self._checked(model, partial(chat.grammar, prompt, loose), param)

    async def _raw_grammar(self, model: LoadedModel, constraint: Constraint | None) -> str | None:
        """What an answer without any form of a chat's may be; None where it is free."""
        return await self._checked(model, constraint.grammar, constraint.param) if constraint else None

    async def _checked(self, model: LoadedModel, write: Callable[[], str | None], param: str) -> str | None:
        """A grammar that the model can be held to, written beside the event loop, as schemas may be long.

        Raises RequestError.
        """
        grammar = await asyncio.to_thread(write)
        if grammar is not None:
            await self._checker.check(grammar, model.folder, model.engine.info.vocab_size, param)
        return grammar

    def _generate(
        self,
        acquired: _Acquired,
        prompts: _Prompts,
        options: Options,
        held: ExitStack,
        new_parser: Callable[[], OutputParser] = PlainOutput,
        grammar: str | None = None,
    ) -> Generation:
        """Check every engine request, then start them."""
        model, record, load_seconds = acquired
        self._keep_prompts(record, model, prompts.ids)
        options = completed(options, model.preset)
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
                sampling=engine_sampling(options, model, number, echoed is not None, len(ids), grammar),
                salt=self._salt(options.cache_salt),
                lasting=options.lasting,
                reports_progress=options.reports_progress,
                urgent=prompts.urgent,
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
            context_len=context_len_of(model, options),
            num_left_out=prompts.num_left_out,
            prompt=prompts.ids[0],
        )
        source = Relay(self.models, model, options.keep_alive)
        return Generation(head, source, jobs, options.n, self.metrics, record, on_close, load_seconds)


def _with_budget(chat: ChatFormat, prompt: Prompt, request: ChatRequest) -> Options:
    """The options, with a limit for reasoning where one is asked for."""
    options = request.options
    if request.thinking_tokens is None:
        return options
    budget = chat.thinking_budget(prompt, request.thinking_tokens)
    return replace(options, sampling=msgspec.structs.replace(options.sampling, thinking=budget))
