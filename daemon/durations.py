"""Times as people and clients write them: seconds, or Go's "1h30m" (Go, time.ParseDuration)."""

from __future__ import annotations

import math
import re

# What a Go duration can hold (2**63 - 1 ns, 292 years); more is for ever, as less than nothing is.
LONGEST = (2**63 - 1) / 1e9

_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_NUMBER = re.compile(r"[+-]?(\d+(?:\.\d*)?|\.\d+)")
_DURATION = re.compile(rf"([+-]?)((?:{_PART})+)")


def parse_duration(value: str | float) -> float:
    """Seconds, of a number or a text. Infinity for a negative time, which means "for ever".

    Raises ValueError for what is no time.
    """
    seconds = _parse_text(value) if isinstance(value, str) else float(value)
    if math.isnan(seconds):
        raise ValueError(value)
    return seconds if 0 <= seconds < LONGEST else math.inf


def _parse_text(text: str) -> float:
    if _NUMBER.fullmatch(text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(text)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_PART, match[2]))
    return -seconds if match[1] == "-" else seconds
