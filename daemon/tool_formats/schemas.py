"""What a JSON schema says of the types of values (JSON Schema 2020-12), as far as reading them needs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST_DEPTH = 16
_MOST_SCHEMAS = 1000
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


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema may allow; all of them where it does not say. root: what `$ref` refers to.

    A keyword whose value is of no use for it says nothing.
    """
    return _Types(root).of(schema, 0)


def listed(schema: Any, keyword: str) -> list[Any]:
    """The list under a keyword; empty where there is none."""
    value = schema.get(keyword) if isinstance(schema, Mapping) else None
    return value if isinstance(value, list) else []


class _Types:
    """Looks at so many schemas and no more: each may refer to all others."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _MOST_SCHEMAS

    def of(self, schema: Any, depth: int) -> frozenset[str]:
        self._num_left -= 1
        if not isinstance(schema, Mapping) or depth > _MOST_DEPTH or self._num_left < 0:
            return ALL_TYPES
        types = ALL_TYPES
        if named := [schema.get("type")] if isinstance(schema.get("type"), str) else listed(schema, "type"):
            types &= {name for name in named if isinstance(name, str)}
        if "const" in schema:
            types &= {json_type(schema["const"])}
        if values := listed(schema, "enum"):
            types &= {json_type(value) for value in values}
        for keyword in ("anyOf", "oneOf"):
            if parts := listed(schema, keyword):
                types &= frozenset().union(*(self.of(part, depth + 1) for part in parts))
        if "$ref" in schema:
            types &= self.of(_referred(schema["$ref"], self._root), depth + 1)
        return types | {"integer"} if "number" in types else types


def _referred(reference: Any, root: Any) -> Any:
    """What a reference within the schema points to (RFC 6901); None for any other."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    for part in reference.removeprefix("#").removeprefix("/").split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, Mapping) and name else root
    return root
