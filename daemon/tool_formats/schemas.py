"""What a JSON schema says of the types of values (JSON Schema 2020-12), as far as reading them needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})


def json_type(value: object) -> str:
    """The name of the type of a JSON value. An integer is `integer`, also where it is a number."""
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
        case list():
            return "array"
    return "object"


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The types that a schema may allow; all of them where it does not say. root: what `$ref` refers to."""
    if not isinstance(schema, Mapping) or depth > 16:
        return ALL_TYPES
    types = ALL_TYPES
    if "type" in schema:
        named = schema["type"]
        types &= frozenset([named] if isinstance(named, str) else named)
    if "const" in schema:
        types &= {json_type(schema["const"])}
    if "enum" in schema:
        types &= {json_type(value) for value in schema["enum"]}
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema:
            types &= frozenset().union(*(types_of(part, root, depth + 1) for part in schema[keyword]))
    if "$ref" in schema:
        types &= types_of(_referred(schema["$ref"], root), root, depth + 1)
    return types | {"integer"} if "number" in types else types


def _referred(reference: Any, root: Any) -> Any:
    """What a reference within the schema points to (RFC 6901); None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for part in reference.removeprefix("#").removeprefix("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) and name else root
    return root
