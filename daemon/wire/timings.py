"""llama-server's timings of an answer, which its clients also look for in OpenAI's forms."""

from __future__ import annotations

from typing import TypedDict

from quantd.daemon.deltas import Usage


class Timings(TypedDict):
    """Tokens, milliseconds and rates. cache_n: of the prompt, found in the cache; prompt_n: computed."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


def timings(usage: Usage) -> Timings:
    """What an answer took so far; rates are 0 where there was no time or no token."""
    num_computed = usage.prompt_tokens - usage.cached_tokens
    prompt_ms, predicted_ms = 1000 * usage.prompt_seconds, 1000 * usage.decode_seconds
    return {
        "cache_n": usage.cached_tokens,
        "prompt_n": num_computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, num_computed),
        "prompt_per_second": _ratio(1000 * num_computed, prompt_ms),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, usage.completion_tokens),
        "predicted_per_second": _ratio(1000 * usage.completion_tokens, predicted_ms),
    }


def _ratio(amount: float, divisor: float) -> float:
    return amount / divisor if divisor else 0.0
