"""JSON schemas as llguidance takes them, so that an answer is valid by JSON Schema 2020-12.

llguidance (docs/json_schema.md) compiles most of the language, and refuses by itself what it knows that it
cannot do. Here is the rest: what it would skip, or take for less than it says, is refused by name, or written
so that it holds. JSON is compact but for a space that may follow a comma or a colon, as models write it: in
white space a model could go on for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias
from urllib.parse import unquote

from quantd.daemon.json_numbers import inexact, missed_bound
from quantd.engine.errors import RequestError

Schema: TypeAlias = Mapping[str, Any] | bool

MAX_DEPTH = 50
MAX_SCHEMAS = 20_000

# Of any draft: llguidance refuses them where they are of the schema's own draft, and skips them elsewhere.
# fmt: off
_UNSUPPORTED = frozenset({
    "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedItems", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef", "extends", "disallow", "divisibleBy",
})
# All others only say something about a schema, or are unknown, which is the same (2020-12, section 6.5).
_SUPPORTED = frozenset({
    "type", "const", "enum", "anyOf", "oneOf", "allOf", "$ref", "items", "prefixItems", "minItems",
    "maxItems", "properties", "patternProperties", "additionalProperties", "required", "minProperties",
    "maxProperties", "minLength", "maxLength", "pattern", "format", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
})
# fmt: on
_ASKING_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "not": (False,),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_CHOICES = (("$ref", str), ("enum", list), ("const", str | int | float), ("anyOf", list), ("oneOf", list))
_ONE = ("items", "additionalProperties")
_MANY = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties")
_IN_PLACE = ("allOf", "anyOf", "oneOf")

_YEAR = r"(?:[1-9]\d{3}|0[1-9]\d\d|00[1-9]\d|000[1-9])"
_LEAP_YEAR = r"(?:\d\d(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"^(?:{_LEAP_YEAR}-02-29|{_YEAR}-(?:(?:0[13-9]|1[0-2])-\d\d|02-(?:[01]\d|2[0-8])))"
# What llguidance's formats let through: February 29 in any year, a year 0, a second 60, too long names.
_FORMATS: Mapping[str, dict[str, Any]] = {
    "date": {"pattern": _DATE},
    "date-time": {"pattern": _DATE + r".\d\d:\d\d:[0-5]"},
    "time": {"pattern": r"^\d\d:\d\d:[0-5]"},
    "hostname": {"maxLength": 253},
}
_ESCAPES = 'nrbtf\\"'
_MOST_MEETING = 200
_MAX_PLACE_LEN = 100


def enforceable(schema: Schema, param: str) -> dict[str, Any]:
    """A schema with options for llguidance that allows the same values, or fewer.

    Raises RequestError for `param` naming what cannot be enforced, and where it is. What llguidance refuses
    by itself shows when the grammar is compiled.
    """
    return _Strict(schema, param).run()


def loosened(schema: Schema) -> dict[str, Any]:
    """A schema with options for llguidance that allows all that `schema` does, and perhaps more.

    For clients that do not insist: types, properties and values to choose from are kept, and every schema
    gives one that can be enforced.
    """
    return _Loose(schema, "").run()


class _Rewriting:
    """Rewrites a schema and what it refers to. The rest of its document does not matter."""

    def __init__(self, root: Schema, param: str) -> None:
        self._root = root
        self._param = param
        self._names: dict[str, str] = {}
        self._undefined: deque[str] = deque()
        self._num_schemas = 0
        self._escapes = _ESCAPES

    def run(self) -> dict[str, Any]:
        root = self._next(self._root, "schema", 0)
        defined: dict[str, Any] = {}
        while self._undefined:
            reference = self._undefined.popleft()
            defined[self._names[reference]] = self._next(self._target(reference), reference, 0)
        options = {
            "whitespace_flexible": False,
            "item_separator": ", ?",
            "key_separator": ": ?",
            "json_allowed_escapes": self._escapes,
        }
        whole = {"allOf": [root]} if isinstance(root, bool) else root
        return {"x-guidance": options, **whole, "$defs": defined}

    def _next(self, schema: Any, where: str, depth: int) -> dict[str, Any] | bool:
        if isinstance(schema, bool):
            return schema
        self._num_schemas += 1
        if depth > MAX_DEPTH or self._num_schemas > MAX_SCHEMAS:
            return self._give_up(where)
        return self._schema(schema, where, depth)

    def _give_up(self, where: str) -> bool:
        """What stands for a schema that is one too many."""
        raise NotImplementedError

    def _schema(self, schema: Any, where: str, depth: int) -> dict[str, Any] | bool:
        raise NotImplementedError

    def _value(self, key: str, value: Any, where: str, depth: int) -> Any:
        """What stands behind a keyword, rewritten where it holds schemas."""
        where = f"{where}.{key}"
        if key in _ONE:
            return self._next(value, where, depth)
        if key in _MANY and isinstance(value, list):
            return [self._next(one, f"{where}[{i}]", depth) for i, one in enumerate(value)]
        if key in _NAMED and isinstance(value, Mapping):
            return {name: self._next(one, f"{where}.{name}", depth) for name, one in value.items()}
        if key == "$ref":
            return f"#/$defs/{self._name(str(value))}"
        return value

    def _name(self, reference: str) -> str:
        if reference not in self._names:
            self._names[reference] = f"d{len(self._names)}"
            self._undefined.append(reference)
        return self._names[reference]

    def _target(self, reference: str) -> Any:
        """What a reference to a part of the document refers to (RFC 6901, section 6)."""
        start, *steps = reference.split("/")
        target: Any = self._root
        for step in (unquote(step).replace("~1", "/").replace("~0", "~") for step in steps):
            try:
                target = target[int(step)] if isinstance(target, list) else target[step]
            except (LookupError, TypeError, ValueError):
                start = ""
        if start != "#":
            raise self._refusal(f"$ref {reference!r} is not in the schema, as #/$defs/NAME is")
        return target

    def _refusal(self, message: str) -> RequestError:
        return RequestError(f"{self._param}: {message}", self._param)


class _Loose(_Rewriting):
    """One rule for each value, so that rules never contradict each other."""

    def _next(self, schema: Any, where: str, depth: int) -> dict[str, Any] | bool:
        # What allows nothing could stand where there must be something.
        return super()._next(schema is False or schema, where, depth)

    def _give_up(self, where: str) -> bool:
        return True

    def _schema(self, schema: Any, where: str, depth: int) -> dict[str, Any] | bool:
        if not isinstance(schema, Mapping):
            return True
        shape = self._shape(_with_prefix_items(schema), where, depth + 1)
        for key, kind in _CHOICES if not shape else _CHOICES[:3]:
            value = schema.get(key)
            if isinstance(value, kind) and value and not inexact({key: value}):
                return {"anyOf" if key == "oneOf" else key: self._value(key, value, where, depth + 1)}
        return shape

    def _shape(self, schema: Mapping[str, Any], where: str, depth: int) -> dict[str, Any]:
        types = schema.get("type")
        named = [types] if isinstance(types, str) else types if isinstance(types, list) else []
        shape: dict[str, Any] = {"type": types} if named and all(one in _TYPES for one in named) else {}
        for key, kind in (("properties", Mapping), ("prefixItems", list), ("items", Mapping)):
            if isinstance(schema.get(key), kind):
                shape[key] = self._value(key, schema[key], where, depth)
        required = schema.get("required")
        if isinstance(required, list):
            shape["required"] = [name for name in required if isinstance(name, str)]
        return shape

    def _target(self, reference: str) -> Any:
        try:
            return super()._target(reference)
        except RequestError:
            return True


class _Strict(_Rewriting):
    """Keeps every rule that can be kept, and refuses the others."""

    def __init__(self, root: Schema, param: str) -> None:
        super().__init__(root, param)
        self._escapes += "u"

    def _give_up(self, where: str) -> bool:
        place = where[:_MAX_PLACE_LEN]
        raise self._refusal(f"{place}: more than {MAX_SCHEMAS} schemas, or nested more than {MAX_DEPTH} deep")

    def _schema(self, schema: Any, where: str, depth: int) -> dict[str, Any] | bool:
        if not isinstance(schema, Mapping):
            raise self._refusal(f"{where} must be an object, true or false")
        if schema is not self._root and not str(schema.get("$id", "#")).startswith("#"):
            raise self._refusal(f"{where}: $id, an address of its own, can only be given to the whole schema")
        schema = {key: value for key, value in _with_prefix_items(schema).items() if _asks(key, value)}
        self._check(schema, where)
        if schema.get("additionalProperties") is not False and any(key in schema for key in _NAMED):
            # A property's name, one letter of which is written as an escape, is to llguidance another name,
            # for which additionalProperties hold. So no character is written that way.
            self._escapes = _ESCAPES
        rewritten = {key: self._value(key, value, where, depth + 1) for key, value in schema.items()}
        return _with_strict_format(rewritten)

    def _check(self, schema: Mapping[str, Any], where: str) -> None:
        for key in schema:
            if key in _UNSUPPORTED:
                raise self._refusal(f"{where}: {key} cannot be enforced")
        if (found := inexact(schema)) is not None:
            raise self._refusal(f"{where}: {found[0]} {found[1]} has more digits than can be enforced")
        if (bound := missed_bound(self._meeting(schema, where))) is not None:
            raise self._refusal(
                f"{where}: {bound.keyword} {bound.value} cannot be enforced less than 1 from another bound"
            )
        least, required = schema.get("minProperties"), schema.get("required")
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else ()
        # A property of no schema of its own may come twice, which counts once.
        if isinstance(least, int) and least > max(1, len(names)):
            raise self._refusal(f"{where}: minProperties cannot be enforced beyond 1 and what is required")

    def _meeting(self, schema: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
        """The schemas that one value may have to fit together."""
        waiting: deque[Any] = deque([schema])
        seen: dict[int, Mapping[str, Any]] = {}
        while waiting:
            one = waiting.popleft()
            if not isinstance(one, Mapping) or id(one) in seen:
                continue
            if len(seen) == _MOST_MEETING:
                raise self._refusal(f"{where}: more than {_MOST_MEETING} schemas hold for one value")
            seen[id(one)] = one
            yield one
            for key in _IN_PLACE:
                waiting += one[key] if isinstance(one.get(key), list) else ()
            if "$ref" in one:
                waiting.append(self._target(str(one["$ref"])))


def _asks(key: str, value: Any) -> bool:
    """Whether a keyword says which values are valid."""
    nothing = _ASKING_NOTHING.get(key, ())
    if any(value == one and type(value) is type(one) for one in nothing):
        return False
    return key in _SUPPORTED or key in _UNSUPPORTED


def _with_prefix_items(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tuples of drafts before 2020-12 in its words; without them additionalItems says nothing."""
    others = {key: value for key, value in schema.items() if key != "additionalItems"}
    if not isinstance(schema.get("items"), list):
        return others
    return others | {"prefixItems": schema["items"], "items": schema.get("additionalItems", True)}


def _with_strict_format(schema: dict[str, Any]) -> dict[str, Any]:
    stricter = _FORMATS.get(str(schema.get("format")))
    if stricter is None:
        return schema
    others = schema.get("allOf", [])
    return {**schema, "allOf": [*others, stricter]} if isinstance(others, list) else schema
