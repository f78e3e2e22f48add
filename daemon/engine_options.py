"""What an engine is told of a request's options, with the model's own in what they leave open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from quantd.daemon.loaded_model import LoadedModel
from quantd.daemon.preset import Preset
from quantd.daemon.requests import Options
from quantd.engine.request import INT64_MAX, MAX_TOKENS, SamplingParams


def completed(options: Options, preset: Preset) -> Options:
    """The options with the model's own in what they leave open."""
    sampling = options.sampling
    if sampling.max_tokens is None:
        sampling = msgspec.structs.replace(sampling, max_tokens=preset.max_tokens)
    return replace(
        options,
        sampling=sampling,
        stop=options.stop or tuple(preset.stop),
        context_len=preset.context_len if options.context_len is None else options.context_len,
    )


def context_len_of(model: LoadedModel, options: Options) -> int:
    """Tokens, prompt and answer, that a request may have."""
    own = completed(options, model.preset).context_len
    served = model.engine.info.max_request_len
    return served if own is None else min(own, served)


def engine_sampling(
    options: Options, model: LoadedModel, number: int, echo: bool, prompt_len: int, grammar: str | None
) -> SamplingParams:
    """The engine's parameters of a prompt's choice `number`."""
    known = model.sampling_defaults(options.usual)
    defaults: dict[str, Any] = {name: known[name] for name in options.open & known.keys()}
    sampling = msgspec.structs.replace(options.sampling, **defaults)
    vocab_size = model.engine.info.vocab_size
    bias = {
        token_id: bias
        for text, bias in options.biased_texts.items()
        for token_id in model.tokenizer.encode(text)
    }
    # Behind what a grammar describes comes nothing but an end; ignored, it comes as late as can be.
    keeps_on = options.ignore_eos and grammar is not None
    ends = tuple(
        end
        for end in sorted(model.tokenizer.end_ids)
        if end < vocab_size and (keeps_on or not options.ignore_eos)
    )
    return msgspec.structs.replace(
        sampling,
        min_tokens=MAX_TOKENS if keeps_on else sampling.min_tokens,
        seed=None if sampling.seed is None else _wrap_int64(sampling.seed, number),
        logit_bias=bias | sampling.logit_bias,
        max_tokens=_max_tokens(sampling.max_tokens, options.context_len, prompt_len),
        stop_token_ids=tuple(dict.fromkeys(ends + sampling.stop_token_ids)),
        grammar=grammar,
        prompt_logprobs=sampling.logprobs if echo else None,
    )


def _max_tokens(max_tokens: int | None, context_len: int | None, prompt_len: int) -> int | None:
    """What is left of a context that the request itself bounds; one token where none is left."""
    if context_len is None:
        return max_tokens
    room = max(context_len - prompt_len, 1)
    return room if max_tokens is None else min(max_tokens, room)


def _wrap_int64(seed: int, number: int) -> int:
    """seed + number. One that is no int64 stays as it is, for the engine's check to name it."""
    if not -INT64_MAX - 1 <= seed <= INT64_MAX:
        return seed
    return (seed + number + INT64_MAX + 1) % (2 * (INT64_MAX + 1)) - INT64_MAX - 1
