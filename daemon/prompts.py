"""Requests as a model reads them: conversations, gaps and raw prompts in tokens; long ones in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import msgspec

from quantd.daemon.chat_format import ChatFormat, Prompt
from quantd.daemon.engine_options import context_len_of
from quantd.daemon.errors import NoInfillError
from quantd.daemon.infill import InfillPrompt, InfillWriter
from quantd.daemon.loaded_model import LoadedModel
from quantd.daemon.requests import ChatRequest, InfillRequest, Options
from quantd.daemon.templates import Message
from quantd.daemon.tokenizer import Tokenizer
from quantd.daemon.tool_formats.format import CallRules, read_tools
from quantd.daemon.truncation import shortened
from quantd.engine.errors import RequestError
from quantd.quant.errors import CheckpointError

# Text that takes more than a few milliseconds to be made a prompt leaves the event loop free.
_LONG_TEXT = 20_000
# Tokens left to an answer in a gap that has no limit of its own.
_INFILL_ROOM = 256

Result = TypeVar("Result")


async def chat_format(model: LoadedModel, request: ChatRequest) -> ChatFormat:
    """How the model is asked: with the request's own template, if it has one. Raises RequestError."""
    if request.template is not None:
        try:
            async with model.guests:
                template = await asyncio.to_thread(model.tokenizer.chat_template, request.template)
            return ChatFormat(template, model.tokenizer)
        except CheckpointError as error:
            raise RequestError(f"template: {error}; it must be Jinja, not Go", "template") from error
    chat = model.tool_chat if request.tools else model.chat
    if chat is None:
        raise RequestError(f"the model {model.name} has no chat template; use /v1/completions", "model")
    return chat


async def chat_prompt(model: LoadedModel, chat: ChatFormat, request: ChatRequest) -> Prompt:
    """The conversation as the model reads it. Raises RequestError where the template refuses it."""
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
        limit = context_len_of(model, request.options)
        return render(shortened(messages, lambda fewer: len(render(fewer).ids) < limit))

    async with model.prompting if request.template is None else model.guests:
        return await asyncio.to_thread(render_fitting)


def _behind(history: Sequence[int], ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """The tokens behind others, with the first tokens of a text only there."""
    if not history:
        return ids
    head = tokenizer.head
    return [*history, *(ids[len(head) :] if ids[: len(head)] == head else ids)]


def call_rules(request: ChatRequest) -> CallRules | None:
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


def infill_writer_of(model: LoadedModel) -> InfillWriter:
    """What writes the model's prompts for gaps. Raises NoInfillError."""
    if model.infill is None:
        raise NoInfillError(
            f"the model {model.name} has not learnt to fill gaps: its tokenizer lacks the tokens for a "
            "prefix and a suffix; send a prompt without a suffix, or name another model",
            "suffix",
        )
    return model.infill


async def infill_prompt(model: LoadedModel, writer: InfillWriter, request: InfillRequest) -> InfillPrompt:
    """The prompt for a gap, with as many files as leave room for an answer where that is wanted."""
    text, limit = request.text, _infill_limit(model, request.options)

    def write() -> InfillPrompt:
        return writer.fitted(text, limit) if request.trims_files else writer.prompt(text)

    sizes = (len(file.text) for file in text.files)
    return await in_time(sum(sizes, len(text.prefix) + len(text.suffix)), write)


def _infill_limit(model: LoadedModel, options: Options) -> int:
    """Tokens of a prompt that leave room for its answer."""
    context_len = context_len_of(model, options)
    answer_len = options.sampling.max_tokens or _INFILL_ROOM
    return context_len - min(answer_len, context_len // 2)


def infill_options(model: LoadedModel, writer: InfillWriter, request: InfillRequest) -> Options:
    """With the family's ends of an answer."""
    options = request.options
    vocab_size = model.engine.info.vocab_size
    ends = tuple(end for end in writer.stop_ids if end < vocab_size and not options.ignore_eos)
    sampling = msgspec.structs.replace(
        options.sampling, stop_token_ids=options.sampling.stop_token_ids + ends
    )
    stops = writer.format.stops if request.text.files else ()
    return replace(options, sampling=sampling, stop=options.stop + stops)


async def raw_prompts(tokenizer: Tokenizer, prompts: Sequence[str | Sequence[int | str]]) -> list[list[int]]:
    """Raw prompts in tokens."""
    pieces = [[prompt] if isinstance(prompt, str) else prompt for prompt in prompts]
    size = sum(len(item) for items in pieces for item in items if isinstance(item, str))
    return await in_time(size, lambda: [_raw_prompt(tokenizer, items) for items in pieces])


def _raw_prompt(tokenizer: Tokenizer, pieces: Sequence[int | str]) -> list[int]:
    """Pieces in tokens. What goes before a raw text goes before those that begin with one."""
    ids: list[int] = []
    for place, item in enumerate(pieces):
        ids += tokenizer.encode(item, raw=place == 0) if isinstance(item, str) else (item,)
    return ids


async def in_time(num_characters: int, work: Callable[[], Result]) -> Result:
    """The result of work on so much text; what takes long leaves the event loop to the others."""
    return work() if num_characters < _LONG_TEXT else await asyncio.to_thread(work)
