"""Grammars in llguidance's dialect of Lark, put together from the rules of their parts.

Source: llguidance, docs/syntax.md: special tokens stand in rules as `<[id]>` and match no text; a rule
marked lazy ends as soon as its terminal matches; `&` and `~` work on terminals only.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from quantd.daemon.constraints import json_rule, quoted

ANY_TEXT = "/(?s:.*)/"


class AddedTokens(Protocol):
    """A tokenizer that knows its added tokens."""

    def split_added(self, text: str) -> Iterable[str | int]:
        """A text cut at added tokens, which are given by id."""


class Lark:
    """A grammar under way: each rule gets a name of its own."""

    def __init__(self, tokens: AddedTokens) -> None:
        self._tokens = tokens
        self._rules: list[str] = []
        self._embedded: list[str] = []

    def rule(self, body: str, lazy: bool = False) -> str:
        """A rule. Returns the name that stands for it."""
        name = f"r{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def terminal(self, body: str) -> str:
        """A terminal: matched as one regular expression, without tokens."""
        name = f"T{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def literal(self, text: str) -> str:
        """This text, where the tokenizer's own tokens stand for what they spell."""
        parts = self._tokens.split_added(text)
        return " ".join(f"<[{part}]>" if isinstance(part, int) else quoted(part) for part in parts)

    def schema(self, schema: Mapping[str, Any]) -> str:
        """JSON that this schema, as llguidance takes it, allows."""
        return self.rule(json_rule(schema))

    def text(self, but: str = "") -> str:
        """Any text, but none that this expression of terminals matches."""
        return self.rule(self.terminal(f"{ANY_TEXT} & ~({but})" if but else ANY_TEXT))

    def text_through(self, mark: str, but: str = "") -> str:
        """Any text up to the first such mark, and the mark, as a token or spelled out."""
        spelled = f"{ANY_TEXT} {quoted(mark)}"
        spelled = self.rule(self.terminal(f"({spelled}) & ~({but})" if but else spelled), lazy=True)
        token = self.literal(mark)
        if token == quoted(mark):
            return spelled
        return self.rule(f"{self.text(but)} {token} | {spelled}")

    def embed(self, grammar: str) -> str:
        """A whole grammar of its own. Returns the expression that stands for it."""
        self._embedded.append(grammar)
        return f"@g{len(self._embedded) - 1}"

    def grammar(self, start: str) -> str:
        """The whole, beginning with this expression."""
        text = "\n".join(["%llguidance {}", f"start: {start}", *self._rules, ""])
        if not self._embedded:
            return text
        parts = [{"name": f"g{i}", "lark_grammar": grammar} for i, grammar in enumerate(self._embedded)]
        return json.dumps({"grammars": [{"lark_grammar": text}, *parts]})
