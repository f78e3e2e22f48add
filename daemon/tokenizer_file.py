"""tokenizer.json as hostile input: no little text becomes a huge one, and what fails is told as an error."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from quantd.engine.errors import RequestError
from quantd.quant.errors import CheckpointError
from quantd.quant.tokenizers_failures import failures_told

MAX_BYTES = 256 << 20
# How many times as long a text may become. Steps may stand in a row, so what doubles it does so each time.
_MOST_GROWTH = 256
_GROWTH = {"ByteLevel": 2, "NFKC": 3, "NFKD": 3, "BertNormalizer": 3, "Precompiled": 4}


class _Steps(msgspec.Struct, frozen=True):
    """What a tokenizer does to a text and from it; the rest, which takes long, is skipped."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def read_tokenizer(file: Path) -> tokenizers.Tokenizer:
    """The tokenizer in a file. Raises CheckpointError for one that is not valid, or could exhaust memory."""
    try:
        if file.stat().st_size > MAX_BYTES:
            raise CheckpointError(f"{file}: larger than {MAX_BYTES} bytes, which no tokenizer needs")
        steps = msgspec.json.decode(file.read_bytes(), type=_Steps)
        growth = _growth([steps.normalizer, steps.pre_tokenizer]), _growth(steps.decoder)
        if max(growth) > _MOST_GROWTH:
            raise CheckpointError(f"{file}: its steps could make a text {max(growth):g} times as long")
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not a valid tokenizer: {error}") from error
    with failures_told(lambda reason: CheckpointError(f"{file}: not a valid tokenizer: {reason}")):
        return tokenizers.Tokenizer.from_file(str(file))


def _growth(step: object) -> float:
    """The most that a step, or the steps in it, can lengthen a text."""
    if isinstance(step, list):
        return math.prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1
    inner = math.prod(_growth(value) for value in step.values() if isinstance(value, dict | list))
    if step.get("type") == "Replace":
        # An expression may match between any two characters. What shortens may find nothing to shorten.
        return inner * max(1, len(str(step.get("content"))) + _is_expression(step.get("pattern")))
    return inner * _GROWTH.get(str(step.get("type")), 1)


def _is_expression(pattern: object) -> bool:
    return not (isinstance(pattern, dict) and pattern.get("String"))


def refused_texts() -> AbstractContextManager[None]:
    """Around what is done with a text: raises RequestError where the tokenizer fails on it."""
    return failures_told(_refusal)


def _refusal(reason: str) -> RequestError:
    return RequestError(f"the model's tokenizer fails on this text: {reason}", "messages")
