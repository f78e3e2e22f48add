"""The fields by which OpenAI's clients say what form an answer must have.

Sources: OpenAI API reference (response_format); vLLM's structured_outputs and, before them, guided_*.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from quantd.daemon.constraints import (
    Choice,
    Constraint,
    JsonObject,
    JsonSchema,
    Regex,
    written_grammar,
)
from quantd.engine.errors import RequestError


class NamedSchema(msgspec.Struct, frozen=True):
    name: str = ""
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """One of its fields is given. json: a schema, or its text."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: Any = None


def format_constraint(format: ResponseFormat | None) -> Constraint | None:
    """What response_format asks for. llama-server's clients put the schema beside its type."""
    if format is None or format.type == "text":
        return None
    schema = format.schema if format.json_schema is None else format.json_schema.schema
    if schema is not None:
        return JsonSchema(schema)
    if format.type == "json_schema":
        raise RequestError("response_format.json_schema.schema is missing", "response_format")
    return JsonObject()


def structured(fields: StructuredOutputs | None, prefix: str) -> Constraint | None:
    """What one of these fields asks for. prefix: of their names in messages."""
    if fields is None:
        return None
    where = prefix if prefix.endswith("_") else f"{prefix}."
    for name in ("structural_tag", "whitespace_pattern"):
        if getattr(fields, name) is not None:
            raise RequestError(f"{where}{name} is not supported", f"{where}{name}")
    return only(
        [
            None if fields.json is None else JsonSchema(_schema(fields.json, f"{where}json"), f"{where}json"),
            None if fields.regex is None else Regex(fields.regex, f"{where}regex"),
            None if fields.choice is None else Choice(fields.choice, f"{where}choice"),
            written_grammar(fields.grammar, f"{where}grammar") if fields.grammar else None,
            JsonObject(f"{where}json_object") if fields.json_object else None,
        ]
    )


def _schema(schema: dict[str, Any] | str, param: str) -> dict[str, Any]:
    if not isinstance(schema, str):
        return schema
    try:
        return msgspec.json.decode(schema, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RequestError(f"{param} is no JSON schema: {error}", param) from None


def only(constraints: Sequence[Constraint | None]) -> Constraint | None:
    """The one that is given. Raises RequestError where there are two."""
    given = [constraint for constraint in constraints if constraint is not None]
    if len(given) > 1:
        raise RequestError(
            "response_format: an answer has one form; give one schema or grammar", "response_format"
        )
    return given[0] if given else None
