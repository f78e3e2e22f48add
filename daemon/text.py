"""Tokens to text, a piece at a time: incremental detokenizing and stop strings.

A tokenizer's decoder is a chain of steps over all tokens of a text (the `decoder` entry of
tokenizer.json). Here each step is an object that is fed one piece at a time and gives out only what no
later piece can change, so the deltas join to exactly what one decode of the whole list gives.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quantd.quant.errors import UnsupportedModelError

REPLACEMENT = "\ufffd"


class Step(Protocol):
    """One step of a decoder: pieces in, pieces out, in order."""

    def feed(self, piece: str) -> Sequence[str]:
        """What is settled once `piece` is known."""

    def flush(self) -> Sequence[str]:
        """What was held back, when no more comes."""


class _EachPiece:
    """A step that changes every piece by itself."""

    def __init__(self, change: Callable[[str], str]) -> None:
        self._change = change

    def feed(self, piece: str) -> Sequence[str]:
        return (self._change(piece),)

    def flush(self) -> Sequence[str]:
        return ()


class _ByteLevel:
    """Pieces are bytes in GPT-2's printable alphabet; the text is their UTF-8, U+FFFD for what is none."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: str) -> Sequence[str]:
        return (self._decoder.decode(byte_level_bytes(piece)),)

    def flush(self) -> Sequence[str]:
        return (self._decoder.decode(b"", final=True),)


class _ByteFallback:
    """A run of pieces `<0xNN>` is UTF-8, or one U+FFFD a byte; only the end of the run tells which."""

    def __init__(self) -> None:
        self._run = bytearray()

    def feed(self, piece: str) -> Sequence[str]:
        byte = fallback_byte(piece)
        if byte is None:
            return (*self.flush(), piece)
        self._run.append(byte)
        return ()

    def flush(self) -> Sequence[str]:
        run, self._run = bytes(self._run), bytearray()
        if not run:
            return ()
        try:
            return (run.decode(),)
        except UnicodeDecodeError:
            return (REPLACEMENT,) * len(run)


class _Metaspace:
    """A replacement mark is a space, and nothing in the first piece if one was put before the text."""

    def __init__(self, mark: str, drops_first: bool) -> None:
        self._mark = mark
        self._first = "" if drops_first else " "

    def feed(self, piece: str) -> Sequence[str]:
        space, self._first = self._first, " "
        return (piece.replace(self._mark, space),)

    def flush(self) -> Sequence[str]:
        return ()


class _StripStart:
    """Cuts up to `count` of a character from the head of the text."""

    def __init__(self, content: str, count: int) -> None:
        self._content = content
        self._left = count

    def feed(self, piece: str) -> Sequence[str]:
        cut = 0
        while cut < min(len(piece), self._left) and piece[cut] == self._content:
            cut += 1
        self._left = 0 if cut < len(piece) else self._left - cut
        return (piece[cut:],)

    def flush(self) -> Sequence[str]:
        return ()


StepMaker = Callable[[bool], Step]


def decoder_steps(decoder: dict[str, Any] | None) -> list[StepMaker]:
    """Makers of the steps of a `decoder` entry of tokenizer.json (Hugging Face tokenizers' format).

    Each maker takes whether the text starts here; if not, nothing is stripped from its head. Raises
    UnsupportedModelError for a decoder that language models are not known to use.
    """
    if decoder is None:
        raise UnsupportedModelError("tokenizer.json has no decoder, so tokens cannot be turned into text")
    makers: list[StepMaker] = []
    fused = False
    for part in _parts(decoder):
        fused = fused or part["type"] in ("Fuse", "ByteLevel")
        if part["type"] != "Fuse":
            makers.append(_step_maker(part, fused))
    return makers


def is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """Whether pieces stand for bytes in GPT-2's printable alphabet."""
    return decoder is not None and any(part["type"] == "ByteLevel" for part in _parts(decoder))


def _parts(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    return decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]


def _step_maker(part: dict[str, Any], fused: bool) -> StepMaker:
    match part:
        case {"type": "ByteLevel"}:
            return lambda at_start: _ByteLevel()
        case {"type": "ByteFallback"} if not fused:
            return lambda at_start: _ByteFallback()
        case {"type": "Metaspace", "replacement": str(mark)} if not fused:
            drops = part.get("prepend_scheme", "always") != "never"
            return lambda at_start: _Metaspace(mark, drops and at_start)
        case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if (
            not fused or len(old) == 1
        ):
            return lambda at_start: _EachPiece(lambda piece: piece.replace(old, new))
        case {"type": "Strip", "content": str(content), "start": int(start), "stop": 0} if fused:
            return lambda at_start: _StripStart(content, start if at_start else 0)
    raise UnsupportedModelError(f"tokenizer.json has a decoder that quantd does not know: {part}")


class IncrementalDetokenizer:
    """Text of a growing list of tokens.

    `piece_of` gives a token's piece, or None where it has no text (a special or unknown token). The
    parts that `feed` and `flush` return join to one decode of all tokens with special tokens skipped.
    at_start False: the text goes on from another, so its head is kept as it is.
    """

    def __init__(
        self, makers: Sequence[StepMaker], piece_of: Callable[[int], str | None], at_start: bool = True
    ) -> None:
        self._steps = [make(at_start) for make in makers]
        self._piece_of = piece_of

    def feed(self, token_id: int) -> str:
        """The text that is settled once this token is known."""
        piece = self._piece_of(token_id)
        return "" if piece is None else "".join(self._run([piece], 0))

    def flush(self) -> str:
        """The rest of the text; an unfinished character becomes U+FFFD."""
        return "".join(
            part for index, step in enumerate(self._steps) for part in self._run(step.flush(), index + 1)
        )

    def _run(self, pieces: Sequence[str], start: int) -> Sequence[str]:
        for step in self._steps[start:]:
            pieces = [out for piece in pieces for out in step.feed(piece)]
        return pieces


class StopStrings:
    """Cuts a stream of text before the first stop string that is completed in it.

    What may still become a stop string is held back. One Knuth-Morris-Pratt state a string, so the work
    is linear in the text, and the result does not depend on where the stream was cut. The tables take
    time and memory, so the choices of a request share them: see `restarted`.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._fails = [_failure_table(stop) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""

    def restarted(self) -> StopStrings:
        """The same strings for another stream, with the same tables."""
        twin = copy.copy(self)
        twin._states = [0] * len(self._stops)
        twin._held = ""
        return twin

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that is free to go out, and the stop string that was met (then nothing may follow)."""
        if not self._stops:
            return text, None
        text, known, self._held = self._held + text, len(self._held), ""
        for position in range(known, len(text)):
            if met := self._advance(text[position]):
                return text[: position + 1 - len(met)], met
        free = len(text) - max(self._states)
        self._held = text[free:]
        return text[:free], None

    @property
    def num_held(self) -> int:
        """Characters that are held back."""
        return len(self._held)

    def flush(self) -> str:
        """The text held back, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str:
        """Take one character; the longest stop string that ends with it, or an empty text."""
        for index, (stop, fail) in enumerate(zip(self._stops, self._fails, strict=True)):
            state = self._states[index]
            while state and stop[state] != char:
                state = fail[state - 1]
            self._states[index] = state + (stop[state] == char)
        met = (stop for stop, state in zip(self._stops, self._states, strict=True) if state == len(stop))
        return max(met, key=len, default="")


def _failure_table(word: str) -> list[int]:
    """For each head of `word`: the length of its longest proper head that is also its tail."""
    table = [0] * len(word)
    for index in range(1, len(word)):
        length = table[index - 1]
        while length and word[index] != word[length]:
            length = table[length - 1]
        table[index] = length + (word[index] == word[length])
    return table


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else the next from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_alphabet()
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_bytes(piece: str) -> bytes:
    """The bytes that a byte-level piece stands for; a piece outside the alphabet is plain text."""
    try:
        return bytes([_BYTES[char] for char in piece])
    except KeyError:
        return piece.encode()


def fallback_byte(piece: str) -> int | None:
    """The byte that a byte-fallback piece stands for."""
    match = _FALLBACK.fullmatch(piece)
    return int(match[1], 16) if match else None
