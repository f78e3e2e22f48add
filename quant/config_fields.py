"""What the readers of quantization records share: typed fields and the limits on their values. Torch-free."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from quantd.quant.errors import CheckpointError, UnsupportedModelError

BITS = (2, 3, 4, 8)

T = TypeVar("T")


def convert(raw: Any, kind: type[T], source: str) -> T:
    try:
        return msgspec.convert(raw, kind, strict=False)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{source}: {error}") from error


def check_pattern(text: str, source: str) -> str:
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"{source}: {text!r} is not a regular expression: {error}") from error
    return text


def check_bits(bits: int, known: tuple[int, ...], source: str) -> None:
    if bits not in known:
        raise UnsupportedModelError(f"{source}: {bits}-bit weights are not supported (known: {known})")
