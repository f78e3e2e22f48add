"""What an answer must be: each kind gives its grammar, in Lark as llguidance reads it.

`param` names the field of the request, for what cannot be enforced.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quantd.daemon.json_schema import Schema, enforceable
from quantd.engine.errors import RequestError

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

# GBNF writes `start ::=`, and its first rule is `root`.
_LARK = re.compile(r"^\s*(%llguidance\b|start\s*(\[[^\]]*\]\s*)?:(?!:=))", re.MULTILINE)


class Constraint(Protocol):
    """A rule that an answer has to follow."""

    def grammar(self) -> str:
        """The rule as a Lark grammar. Raises RequestError naming what cannot be enforced."""


@dataclass(frozen=True)
class JsonSchema:
    """JSON that is valid by a schema. See quantd.daemon.json_schema for how JSON is written."""

    schema: Schema
    param: str = "response_format"

    def grammar(self) -> str:
        return checked(f"start: {json_rule(enforceable(self.schema, self.param))}", self.param)


@dataclass(frozen=True)
class JsonObject:
    """Any JSON object."""

    param: str = "response_format"

    def grammar(self) -> str:
        return JsonSchema(ANY_OBJECT, self.param).grammar()


@dataclass(frozen=True)
class Regex:
    """A text all of which a regular expression matches (Rust's, without looking around and back)."""

    pattern: str
    param: str

    def grammar(self) -> str:
        return checked(f"start: {_quoted_regex(self.pattern)}", self.param)


@dataclass(frozen=True)
class Choice:
    """One of some texts."""

    texts: Sequence[str]
    param: str

    def grammar(self) -> str:
        if not self.texts:
            raise RequestError(f"{self.param}: there is nothing to choose from", self.param)
        # One terminal, whose words are looked through at the same time.
        return "start: CHOICE\nCHOICE: " + " | ".join(map(quoted, self.texts))


@dataclass(frozen=True)
class GbnfGrammar:
    """What a grammar in llama.cpp's form describes."""

    text: str
    param: str

    def grammar(self) -> str:
        from llguidance.gbnf_to_lark import gbnf_to_lark  # takes numpy along

        try:
            lark = gbnf_to_lark(self.text)
        # The converter raises a bare Exception for every fault of the text.
        except Exception as error:
            raise RequestError(f"{self.param}: not valid GBNF: {error}", self.param) from None
        return checked(lark, self.param)


@dataclass(frozen=True)
class LarkGrammar:
    """What a grammar in llguidance's dialect of Lark describes."""

    text: str
    param: str

    def grammar(self) -> str:
        return checked(self.text, self.param)


def checked(lark: str, param: str) -> str:
    """The grammar itself, once llguidance takes it. Raises RequestError with its reason."""
    from llguidance import LLMatcher  # takes numpy along, which few requests need

    reason = LLMatcher.validate_grammar(lark)
    if reason:
        raise RequestError(f"{param}: {' '.join(reason.split())[:500]}", param)
    return lark


def written_grammar(text: str, param: str) -> Constraint:
    """A grammar in either form."""
    return LarkGrammar(text, param) if _LARK.search(text) else GbnfGrammar(text, param)


def json_rule(schema: Mapping[str, Any]) -> str:
    """The expression for JSON of a schema that llguidance takes."""
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


def quoted(text: str) -> str:
    """A text as a literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _quoted_regex(pattern: str) -> str:
    """A regular expression between slashes."""
    return "/" + re.sub(r"\\.|/", lambda part: "\\/" if part[0] == "/" else part[0], pattern) + "/"
