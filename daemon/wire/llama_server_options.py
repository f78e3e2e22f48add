"""What llama-server's completions let a client choose, turned into neutral options.

Source: llama.cpp, tools/server/README.md. Own rules: a kind of sampling that is not here is refused by name
unless its values leave it off; filters apply in an order of their own, so `samplers` only tells which do;
"infill", whose draw prefers likely tokens, is the likeliest token; penalties look at the whole prompt and
answer; t_max_prompt_ms has no effect, as there; id_slot only names what /slots saves.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quantd.daemon.constraints import Constraint, JsonSchema, written_grammar
from quantd.daemon.line_rules import LineRules
from quantd.daemon.requests import Options
from quantd.daemon.wire.body import MAX_CHOICES, check_range, sampling, stop_strings
from quantd.engine.errors import RequestError
from quantd.engine.request import MAX_LOGPROBS

MAX_SLOT = 1023
_RANDOM_SEEDS = (-1, 2**32 - 1)

# Kinds of sampling that are not here: the field that switches each on, and where it is off.
_OFF: Mapping[str, Callable[[Any], bool]] = {
    "typical_p": lambda value: value >= 1,
    "dry_multiplier": lambda value: value == 0,
    "xtc_probability": lambda value: value == 0,
    "mirostat": lambda value: value == 0,
    "dynatemp_range": lambda value: value == 0,
    "top_n_sigma": lambda value: value <= 0,
    "adaptive_target": lambda value: value < 0,
    "min_keep": lambda value: value <= 1,
    "lora": lambda value: all(entry.scale == 0 for entry in value),
}

# What each sampler that is not in a list leaves off.
_SAMPLER_OFF: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "temperature": {"temperature": 1.0},
}
# Samplers that are not here are off by their own fields, so their names do no harm.
_OTHER_SAMPLERS = {"dry", "typ_p", "typical_p", "top_n_sigma", "xtc", "adaptive_p", "infill"}
_SAMPLER_LETTERS = {
    "d": "dry",
    "k": "top_k",
    "y": "typ_p",
    "p": "top_p",
    "s": "top_n_sigma",
    "m": "min_p",
    "t": "temperature",
    "x": "xtc",
    "i": "infill",
    "e": "penalties",
    "a": "adaptive_p",
}


class Lora(msgspec.Struct, frozen=True):
    """An adapter that a client wants."""

    id: int = -1
    scale: float = 0.0


class OptionFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that /completion and /infill share."""

    model: str | None = None
    stream: bool | None = None
    n_predict: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    xtc_probability: float | None = None
    mirostat: int | None = None
    dynatemp_range: float | None = None
    top_n_sigma: float | None = None
    adaptive_target: float | None = None
    min_keep: int | None = None
    samplers: str | list[str] | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    logit_bias: list[Any] | dict[str, Any] | None = None
    stop: str | list[str] | None = None
    n_probs: int | None = None
    post_sampling_probs: bool | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    n_cmpl: int | None = None
    n: int | None = None
    n_indent: int | None = None
    t_max_predict_ms: float | None = None
    cache_prompt: bool | None = None
    id_slot: int | None = None
    lora: list[Lora] | None = None
    return_tokens: bool | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    response_fields: list[str] | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def slot(self) -> int:
        """The slot that the request is of; the first for one that names none."""
        return max(self.id_slot or 0, 0)

    @property
    def caches(self) -> bool:
        """Whether what is computed of the prompt may be used again."""
        return self.cache_prompt in (None, True)

    def options(self) -> Options:
        """The neutral options. Raises RequestError naming a field that is out of bounds or unsupported."""
        self._refuse_other_sampling()
        if not -1 <= (self.id_slot or 0) <= MAX_SLOT:
            raise RequestError(f"id_slot must be between -1 and {MAX_SLOT}, got {self.id_slot}", "id_slot")
        given = self._sampling()
        ids, texts = _logit_bias(self.logit_bias)
        params, left_open = sampling(
            given | {"logit_bias": ids or None},
            max_tokens=self._max_tokens(),
            logprobs=self._num_probs(),
        )
        return Options(
            sampling=params,
            open=left_open,
            n=self._num_choices(),
            stop=stop_strings(self.stop),
            ignore_eos=bool(self.ignore_eos),
            cache_salt="" if self.caches else uuid.uuid4().hex,
            lasting=self.caches,
            biased_texts=texts,
            lines=self._lines(),
            reports_progress=self.streams and bool(self.return_progress),
            constraint=self._constraint(),
        )

    def _constraint(self) -> Constraint | None:
        """What the answer must be; an empty grammar is none."""
        if self.grammar and self.json_schema is not None:
            raise RequestError("json_schema: give it or a grammar, not both", "json_schema")
        if self.json_schema is not None:
            return JsonSchema(self.json_schema, "json_schema")
        return written_grammar(self.grammar, "grammar") if self.grammar else None

    def _refuse_other_sampling(self) -> None:
        for name, is_off in _OFF.items():
            value = getattr(self, name)
            if value is not None and not is_off(value):
                raise RequestError(f"{name}: {value!r} is not supported, leave it off", name)
        if self.post_sampling_probs and self.n_probs:
            raise RequestError(
                "post_sampling_probs is not supported: n_probs tells probabilities before sampling",
                "post_sampling_probs",
            )

    def _sampling(self) -> dict[str, Any]:
        """Sampling by neutral names; None where the model's own counts."""
        given = {
            "temperature": None if self.temperature is None else max(self.temperature, 0.0),
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "seed": None if self.seed in _RANDOM_SEEDS else self.seed,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        given |= self._penalty_window(given)
        if self.samplers is None:
            return given
        names = _sampler_names(self.samplers)
        for name, off in _SAMPLER_OFF.items():
            given |= {} if name in names else off
        return given | ({"temperature": 0.0} if "infill" in names else {})

    def _penalty_window(self, given: Mapping[str, Any]) -> Mapping[str, float]:
        """What repeat_last_n changes: 0 switches penalties off; without any, no window matters."""
        if self.repeat_last_n == 0:
            return _SAMPLER_OFF["penalties"]
        neutral = _SAMPLER_OFF["penalties"].items()
        if self.repeat_last_n in (None, -1) or all(given[name] in (None, value) for name, value in neutral):
            return {}
        raise RequestError(
            f"repeat_last_n: penalties look at all tokens (-1) or at none (0), not at {self.repeat_last_n}",
            "repeat_last_n",
        )

    def _max_tokens(self) -> int | None:
        name = "max_tokens" if self.n_predict is None else "n_predict"
        limit: int | None = getattr(self, name)
        if limit is not None and not -1 <= limit < 2**31:
            raise RequestError(f"{name} must be at least 0, or -1 for no limit, got {limit}", name)
        return None if limit == -1 else limit

    def _num_probs(self) -> int | None:
        if not self.n_probs:
            return None
        check_range("n_probs", self.n_probs, MAX_LOGPROBS)
        return self.n_probs

    def _num_choices(self) -> int:
        name = "n" if self.n_cmpl is None else "n_cmpl"
        count = getattr(self, name)
        if count is not None and not 1 <= count <= MAX_CHOICES:
            raise RequestError(f"{name} must be between 1 and {MAX_CHOICES}, got {count}", name)
        return count or 1

    def _lines(self) -> LineRules:
        limit = self.t_max_predict_ms
        return LineRules(
            min_indent=max(self.n_indent or 0, 0),
            max_seconds=limit / 1000 if limit is not None and limit > 0 else None,
        )


def _sampler_names(samplers: str | list[str]) -> set[str]:
    if isinstance(samplers, str):
        samplers = [_SAMPLER_LETTERS.get(letter, letter) for letter in samplers]
    known = _SAMPLER_OFF.keys() | _OTHER_SAMPLERS
    for name in samplers:
        if name not in known:
            raise RequestError(f"samplers: {name!r} is not one of {', '.join(sorted(known))}", "samplers")
    return set(samplers)


def _logit_bias(bias: list[Any] | dict[str, Any] | None) -> tuple[dict[int, float], dict[str, float]]:
    """Biases by token id and by text. Raises RequestError for what is neither."""
    pairs = [[key, value] for key, value in bias.items()] if isinstance(bias, dict) else bias or []
    ids: dict[int, float] = {}
    texts: dict[str, float] = {}
    for pair in pairs:
        match pair:
            case [int() | str() as key, int() | float() as value] if type(key) is not bool:
                number = _bias_value(value)
                if isinstance(key, str) and not key.isdecimal():
                    texts[key] = number
                else:
                    ids[int(key)] = number
            case _:
                raise RequestError(
                    f"logit_bias: {pair!r} is no pair of a token id or text and a number or false",
                    "logit_bias",
                )
    return ids, texts


def _bias_value(value: float | bool) -> float:
    """A bias; false is a ban."""
    if value is True:
        raise RequestError("logit_bias: true is no bias, only false is one", "logit_bias")
    return -100.0 if value is False else float(value)
