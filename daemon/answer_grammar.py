"""The grammar of a whole answer: first the reasoning, then calls of tools or an answer of a certain form."""

from __future__ import annotations

from dataclasses import dataclass

from quantd.daemon.constraints import quoted
from quantd.daemon.reasoning import ReasoningTags, Start
from quantd.daemon.tool_formats.format import CallRules, ToolFormat
from quantd.daemon.tool_formats.lark import ANY_TEXT, Lark

# White space around a reasoning section.
_SPACE = r"/[ \n]{0,4}/"
# How an answer begins that may be meant as a call without a trigger.
_LIKE_A_CALL = r'/\s*\{\s*"(name|type|function|parameters)"(?s:.*)/'


@dataclass(frozen=True)
class AnswerGrammar:
    """What an answer may be. start: whether it begins in a reasoning section, or may open one.

    rules: what it may call; None: nothing. form: the expression that content has to match; None: any text.
    """

    lark: Lark
    tags: ReasoningTags | None
    start: Start
    format: ToolFormat
    rules: CallRules | None
    form: str | None

    def text(self) -> str:
        """The grammar."""
        body = self.lark.rule(self._body())
        return self.lark.grammar(self._behind_reasoning(body))

    def _behind_reasoning(self, body: str) -> str:
        if self.tags is None or self.start == "over":
            return body
        space = "" if self._starts_free else _SPACE
        thoughts = f"{self.lark.text_through(self.tags.closing)} {space} {body}"
        if self.start == "inside":
            return thoughts
        return f"{_SPACE} {self.lark.literal(self.tags.opening)} {thoughts} | {body}"

    def _body(self) -> str:
        if self.rules is None:
            return self.form or self.lark.text(self._excluded())
        calls = self.format.grammar(self.lark, self.rules.tools, self.rules.parallel)
        if self.rules.required:
            return calls if self.format.starts_bare else f"{self.lark.literal(self.format.trigger)} {calls}"
        bare = f" | {calls}" if self.format.starts_bare else ""
        if self.form is not None:
            return f"{self.form} | {self.lark.literal(self.format.trigger)} {calls}{bare}"
        but = self._excluded()
        return f"{self.lark.text(but)} | {self.lark.text_through(self.format.trigger, but)} {calls}{bare}"

    def _excluded(self) -> str:
        """What a free text must not begin with, since it would be read as something else."""
        opening = f"/\\s*/ {quoted(self.tags.opening)} {ANY_TEXT}" if self.tags is not None else ""
        bare = _LIKE_A_CALL if self.rules is not None and self.format.starts_bare else ""
        return " | ".join(filter(None, (opening, bare)))

    @property
    def _starts_free(self) -> bool:
        return self.form is None and not (self.rules is not None and self.rules.required)
