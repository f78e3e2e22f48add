"""Grammars that answers must follow, compiled and followed by llguidance (torch-free).

A grammar is text in llguidance's form: a Lark grammar, or a JSON object that holds several
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). llguidance bounds by itself how much
work a grammar and each of its masks may take, but for recursion, which takes a deep stack.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from quantd.engine.errors import RequestError
from quantd.engine.request import SamplingParams
from quantd.kernels.shortlist import BitRow

STACK_BYTES = 64 << 20
COMPILE_SECONDS = 20.0

_WORD_BITS = 32
_KEPT = 16
_DETAILS = re.compile(r"\n *\d+ \||\n<")
_MAX_REASON_LEN = 400
_LIMITS = LLParserLimits(verbose_errors=False)

# SentencePiece's decoder in its newer spelling, which llguidance does not know, in the older.
_METASPACE = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ],
}


class GrammarCompiler:
    """Compiles grammars for one model, which takes its tokenizer: read when the first grammar comes.

    folder: of the model. The latest grammars are kept, as clients send theirs again and again.
    """

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()

    def matcher(self, sampling: SamplingParams) -> Matcher:
        """A matcher at the start of a request's grammar. Raises RequestError."""
        assert sampling.grammar is not None
        core = self._compiled(sampling.grammar).deep_copy()
        return Matcher(core, self._tokenizer, sampling.stop_token_ids, sampling.min_tokens)

    def _compiled(self, grammar: str) -> LLMatcher:
        core = self._kept.pop(grammar, None)
        if core is None:
            core = LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
            if core.is_error():
                raise RequestError(f"the grammar cannot be used: {_reason(core)}", "grammar")
        self._kept[grammar] = core
        if len(self._kept) > _KEPT:
            self._kept.popitem(last=False)
        return core

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        file = self._folder / "tokenizer.json"
        try:
            tokenizer = msgspec.json.decode(file.read_bytes())
            text = msgspec.json.encode(_with_known_decoder(tokenizer)).decode()
            return LLTokenizer(text, n_vocab=max(self._vocab_size, _num_ids(tokenizer)))
        # Of a file that is not as expected anything may be missing.
        except Exception as error:
            raise RequestError(f"{file}: grammars cannot be used with it: {error}", "grammar") from error


def _with_known_decoder(tokenizer: dict[str, Any]) -> dict[str, Any]:
    is_metaspace = (tokenizer["decoder"] or {}).get("type") == "Metaspace"
    return tokenizer | {"decoder": _METASPACE} if is_metaspace else tokenizer


def _num_ids(tokenizer: dict[str, Any]) -> int:
    vocab = tokenizer["model"]["vocab"]
    own = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    last: int = max([*own, *(token["id"] for token in tokenizer["added_tokens"])])
    return last + 1


def _reason(core: LLMatcher) -> str:
    """What an error of llguidance says before it shows the source and its own state."""
    words = _DETAILS.split(core.get_error())[0].split()
    return " ".join(words)[:_MAX_REASON_LEN] or str(core.stop_reason())


class Matcher:
    """Where the output of one request stands in its grammar. Knows which tokens may come next.

    end_ids: come only where the grammar is complete, and before min_tokens only where nothing else can.
    """

    def __init__(
        self, core: LLMatcher, tokenizer: LLTokenizer, end_ids: Sequence[int], min_tokens: int
    ) -> None:
        self.core = core
        self.num_words = num_words(tokenizer.vocab_size)
        self._min_tokens = min_tokens
        self._num_fed = 0
        self._ends = bit_row(end_ids, self.num_words)
        # llguidance lets its own end ids come at the end, whatever the request says.
        self._cleared = ~(self._ends | bit_row(tokenizer.eos_tokens, self.num_words))

    def follow(self, output: Sequence[int]) -> None:
        """Go on to the end of a request's output, of which an earlier part may be known already."""
        self.core.consume_tokens(list(output[self._num_fed :]))
        self._num_fed = len(output)

    def is_over(self, output: Sequence[int]) -> bool:
        """Whether a request's output is complete, and nothing can follow."""
        self.follow(output)
        return self.core.is_stopped() and not self.core.is_error()

    def finish(self, row: BitRow) -> str | None:
        """Put the ends right in the bits that `core` gave for the output. Why none is set, if that is so."""
        if self.core.is_error():
            return f"the grammar could not be followed any more: {_reason(self.core)}"
        row &= self._cleared
        if self.core.is_accepting() and (self._num_fed >= self._min_tokens or not row.any()):
            row |= self._ends
        return None if row.any() else "no token of the model can go on as the grammar asks"


def num_words(vocab_size: int) -> int:
    """Of a BitRow for so many tokens."""
    return -(-vocab_size // _WORD_BITS)


def bit_row(token_ids: Sequence[int], num_words: int) -> BitRow:
    """A row in which the bits of these tokens are set."""
    bits = np.zeros(num_words * _WORD_BITS, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


Compiled: TypeAlias = Matcher | RequestError
Done: TypeAlias = Callable[[Compiled], None]


class Grammars(Protocol):
    """Compiles the grammars of requests beside the step loop."""

    def compile(self, sampling: SamplingParams, done: Done) -> None:
        """Have `done` called, on any thread, with a matcher or why there is none; the first call counts."""


class NoGrammars:
    """Of an engine that takes no requests with a grammar."""

    def compile(self, sampling: SamplingParams, done: Done) -> None:
        """See Grammars."""
        done(RequestError("this engine knows no grammars", "grammar"))


NO_GRAMMARS = NoGrammars()


class ModelGrammars:
    """Grammars for a model's tokenizer, one at a time on a thread that the first of them starts."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._jobs: SimpleQueue[tuple[SamplingParams, Done]] = SimpleQueue()
        self._started = False

    def compile(self, sampling: SamplingParams, done: Done) -> None:
        """See Grammars. One that takes too long is given up, though its thread works on."""
        if not self._started:
            self._started = True
            start_thread(self._work, "grammars", STACK_BYTES)
        late = RequestError(f"the grammar was not compiled within {COMPILE_SECONDS:g} s", "grammar")
        timer = threading.Timer(COMPILE_SECONDS, done, (late,))
        timer.daemon = True
        timer.start()

        def finished(result: Compiled) -> None:
            timer.cancel()
            done(result)

        self._jobs.put((sampling, finished))

    def _work(self) -> None:
        while True:
            sampling, done = self._jobs.get()
            try:
                done(self._compiler.matcher(sampling))
            except RequestError as error:
                done(error)


def start_thread(work: Callable[[], None], name: str, stack_bytes: int) -> threading.Thread:
    """Start a daemon thread with a stack of its own size."""
    usual = threading.stack_size(stack_bytes)
    try:
        thread = threading.Thread(target=work, name=name, daemon=True)
        thread.start()
    finally:
        threading.stack_size(usual)
    return thread
