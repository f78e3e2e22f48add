"""How one model chats: what a conversation is as its prompt, and how its answers are read.

Told from its chat template and its tokenizer.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quantd.daemon.answer_grammar import AnswerGrammar
from quantd.daemon.constraints import Constraint
from quantd.daemon.control_tokens import unmark
from quantd.daemon.output_parser import OutputParser, PlainOutput
from quantd.daemon.reasoning import Start, reasoning_tags
from quantd.daemon.scanner import ReadOutput, Scanner, Steps, read_content
from quantd.daemon.templates import ChatTemplate, Message
from quantd.daemon.tokenizer import Tokenizer
from quantd.daemon.tool_formats.format import CallRules, Calls, ToolFormat
from quantd.daemon.tool_formats.lark import Lark
from quantd.daemon.tool_prompts import ToolPrompts
from quantd.daemon.turns import by_turns
from quantd.engine.errors import RequestError
from quantd.engine.request import ThinkingBudget

# What templates look up to switch reasoning on or off.
_SWITCHES = ("enable_thinking", "thinking")
# Seed's budget of tokens; none is to think of.
_BUDGET = "thinking_budget"
# What templates look up where the last message is to be gone on with.
_CONTINUING = {"add_generation_prompt": False, "continue_final_message": True}
# Stands there where that message ends. Its space shows whether the template trims messages.
_END = "<the last message ends here> "


@dataclass(frozen=True)
class Prompt:
    """A conversation as the model reads it. text: with special tokens by name."""

    text: str
    ids: list[int]


@dataclass(frozen=True)
class AnswerRules:
    """What an answer may be. calls: what it may call, None for nothing. form: of its content, if any."""

    calls: CallRules | None = None
    form: Constraint | None = None


class ChatFormat:
    """A chat template with the tokenizer of its model."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer
        self._tags = reasoning_tags(template.source)
        self._tool_prompts = ToolPrompts(template)
        self._tool_format = self._tool_prompts.format

    def prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        documents: Sequence[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        thinking: bool | None = None,
        continues: bool = False,
    ) -> Prompt:
        """The prompt of a conversation. continues: it ends in the last message, to be gone on with.

        Raises RequestError where the template refuses it, also by turns.
        """
        switches = {} if thinking is None else _switches(thinking)
        switches |= dict(variables or {}) | (_CONTINUING if continues else {})
        try:
            mark = self._tokenizer.control_tokens.mark
            shown = _with_end(messages) if continues else messages
            placed, placed_tools = self._tool_prompts.place(mark(shown), mark(tools))
            rendered = self._render(placed, placed_tools, mark(documents), switches)
            rendered = _cut_at_end(rendered) if continues else rendered
        except RecursionError:
            raise RequestError("messages: what they hold is nested too deeply", "messages") from None
        text, spelled = unmark(rendered)
        return Prompt(text, self._tokenizer.encode(text, spelled=spelled))

    def _render(self, messages: Sequence[Message], *others: Any) -> str:
        """The template's text; where it refuses messages that are not by turns, that of the same by turns."""
        try:
            return self._template.render(messages, *others)
        except RequestError:
            turns = by_turns(messages)
            if turns == list(messages):
                raise
            with contextlib.suppress(RequestError):
                return self._template.render(turns, *others)
            raise

    def parser(self, prompt: Prompt, rules: AnswerRules) -> OutputParser:
        """For one answer to this prompt."""
        if rules.calls is None and self._tags is None:
            return PlainOutput()
        return ReadOutput(partial(self._read, self._start(prompt), rules), self._shown(rules))

    def grammar(self, prompt: Prompt, rules: AnswerRules) -> str | None:
        """Of an answer to this prompt; None where it is free.

        Raises RequestError for what cannot be enforced.
        """
        form = None if rules.form is None else rules.form.grammar()
        if rules.calls is None and (form is None or self._tags is None):
            return form
        lark = Lark(self._tokenizer)
        embedded = None if form is None else lark.embed(form)
        start, calls = self._start(prompt), self._call_format(rules)
        return AnswerGrammar(lark, self._tags, start, calls, rules.calls, embedded).text()

    def thinking_budget(self, prompt: Prompt, num_tokens: int) -> ThinkingBudget | None:
        """A limit for the reasoning in an answer to this prompt.

        None where it is over already, or does not end with one token, which could be put there.
        """
        start = self._start(prompt)
        if self._tags is None or start == "over":
            return None
        opening, closing = (self._token(tag) for tag in (self._tags.opening, self._tags.closing))
        if closing is None or (start == "possible" and opening is None):
            return None
        return ThinkingBudget(num_tokens, closing, opening if start == "possible" else None)

    def _token(self, text: str) -> int | None:
        """The added token that spells all of a text."""
        parts = list(self._tokenizer.split_added(text))
        return parts[0] if len(parts) == 1 and isinstance(parts[0], int) else None

    def _start(self, prompt: Prompt) -> Start:
        return "over" if self._tags is None else self._tags.start(prompt.text)

    def _call_format(self, rules: AnswerRules) -> ToolFormat:
        """Where content has a form of its own, it must not be taken for a call."""
        return self._tool_format if rules.form is None else self._tool_format.triggered()

    def _read(self, start: Start, rules: AnswerRules, scanner: Scanner) -> Steps[None]:
        if self._tags is not None:
            yield from self._tags.read(scanner, start)
        if rules.calls is None:
            yield from read_content(scanner)
        else:
            schemas = {tool.name: tool.parameters for tool in rules.calls.tools}
            yield from self._call_format(rules).read(scanner, Calls(schemas, self._new_id))

    def _new_id(self) -> str:
        return secrets.token_hex(5)[:9] if self._tool_prompts.short_ids else f"call_{secrets.token_hex(12)}"

    def _shown(self, rules: AnswerRules) -> frozenset[str]:
        """The special tokens that a parser reads."""
        texts = [] if rules.calls is None else [*self._tool_format.markup]
        if self._tags is not None:
            texts += [self._tags.opening, self._tags.closing]
        return self._tokenizer.special_names(texts)


def _switches(thinking: bool) -> dict[str, Any]:
    """Variables for templates to switch reasoning on or off by."""
    switches: dict[str, Any] = dict.fromkeys(_SWITCHES, thinking)
    return switches if thinking else switches | {_BUDGET: 0}


def _with_end(messages: Sequence[Message]) -> list[Message]:
    """The messages, the last of which shows where it ends."""
    *before, last = messages
    return [*before, last | {"content": last["content"] + _END}]


def _cut_at_end(rendered: str) -> str:
    """A prompt up to where its last message ends. Raises RequestError where the template hides that.

    Source: continue_final_message of transformers' apply_chat_template.
    """
    end = rendered.rfind(_END.strip())
    if end < 0:
        reason = "the model's chat template shows too little of the last one to go on with it"
        raise RequestError(f"messages: {reason}", "messages")
    keeps_space = rendered.startswith(_END, end)
    return rendered[:end] if keeps_space else rendered[:end].rstrip()
