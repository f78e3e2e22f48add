"""What an answer must be: each kind gives its grammar, in Lark as llguidance reads it.

`param` names the field of the request, for what cannot be enforced. Whether llguidance takes a grammar is
found out by quantd.daemon.grammar_check.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from quantd.daemon.gbnf import gbnf_to_lark
from quantd.daemon.json_schema import Schema, enforceable
from quantd.engine.errors import RequestError

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

# GBNF writes `start ::=`, and its first rule is `root`.
_LARK = re.compile(r"^\s*(%llguidance\b|start\s*(\[[^\]]*\]\s*)?:(?!:=))", re.MULTILINE)


class Constraint(Protocol):
    """A rule that an answer has to follow."""

    @property
    def param(self) -> str:
        """The field of the request that holds the rule."""

    def grammar(self) -> str:
        """The rule as a Lark grammar. Raises RequestError naming what cannot be enforced."""


@dataclass(frozen=True)
class JsonSchema:
    """JSON that is valid by a schema. See quantd.daemon.json_schema for how JSON is written."""

    schema: Schema
    param: str = "response_format"

    def grammar(self) -> str:
        return f"start: {json_rule(enforceable(self.schema, self.param))}"


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
        return f"start: {_quoted_regex(self.pattern)}"


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
        return gbnf_to_lark(self.text, self.param)


@dataclass(frozen=True)
class LarkGrammar:
    """What a grammar in llguidance's dialect of Lark describes."""

    text: str
    param: str

    def grammar(self) -> str:
        return self.text


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
