"""What llguidance cannot hold of the numbers in a JSON schema.

It computes with doubles that it reads to about an ulp, and lets a number have a whole exclusive bound that
is close to the other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from itertools import product
from typing import Any, NamedTuple

_KEYWORDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "const", "enum")

# So far numbers are read and written without any rounding.
_EXACT_INT = 2**53
_EXACT_DIGITS = 15
_EXACT_EXPONENT = 22


class Bound(NamedTuple):
    """Of a number."""

    keyword: str
    value: float
    is_lower: bool
    exclusive: bool

    @property
    def may_be_missed(self) -> bool:
        return self.exclusive and self.value == int(self.value)


def inexact(schema: Mapping[str, Any]) -> tuple[str, int | float] | None:
    """A keyword with a number that is not kept exactly."""
    pairs = ((key, number) for key in _KEYWORDS for number in _numbers(schema.get(key)))
    return next(((key, number) for key, number in pairs if not _is_exact(number)), None)


def missed_bound(schemas: Iterable[Mapping[str, Any]]) -> Bound | None:
    """A bound that a number may have although it must not, if all these schemas hold for it."""
    bounds = [bound for schema in schemas for bound in _bounds(schema)]
    for lower, upper in product(bounds, bounds):
        if lower.is_lower and not upper.is_lower and 0 < upper.value - lower.value < 1:
            for bound in (lower, upper):
                if bound.may_be_missed:
                    return bound
    return None


def _bounds(schema: Mapping[str, Any]) -> Iterator[Bound]:
    """Those of a schema, but for whole numbers, which keep theirs."""
    if schema.get("type") == "integer":
        return
    for is_lower, plain, exclusive in (
        (True, "minimum", "exclusiveMinimum"),
        (False, "maximum", "exclusiveMaximum"),
    ):
        # In draft 4 the longer word says of the shorter one how it is meant.
        marked = schema.get(exclusive) is True
        for value in _numbers(schema.get(plain)):
            yield Bound(exclusive if marked else plain, value, is_lower, marked)
        for value in _numbers(schema.get(exclusive)):
            yield Bound(exclusive, value, is_lower, True)


def _numbers(value: Any) -> Iterator[int | float]:
    """All in a JSON value."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list | Mapping):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(one)


def _is_exact(number: int | float) -> bool:
    if isinstance(number, int):
        return abs(number) <= _EXACT_INT
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return isinstance(exponent, int) and len(digits) <= _EXACT_DIGITS and abs(exponent) <= _EXACT_EXPONENT
