"""One continuation: the token events of its engine request turned into deltas of text.

Knows tokens, text and log probabilities; no models, templates or HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from quantd.daemon.content_end import ContentEnd, End, Finish
from quantd.daemon.deltas import Delta, ScoredToken
from quantd.daemon.errors import GenerationError
from quantd.daemon.line_rules import LineLimit, LineRules
from quantd.daemon.output_parser import OutputParser, Piece, PlainOutput, joined
from quantd.daemon.text import StopStrings
from quantd.daemon.tokenizer import Tokenizer
from quantd.engine.request import TokenEvent, TokenLogprob


class Echo:
    """A prompt that is repeated before its answer, with the log probabilities of its tokens where asked."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int], text: str | None, scored: bool) -> None:
        self._tokenizer = tokenizer
        self._ids = ids
        self._scored = scored
        self._logprobs: list[TokenLogprob] = []
        detokenizer = tokenizer.detokenizer(at_start=True)
        parts = [detokenizer.feed(token_id) for token_id in ids]
        self._lengths = [len(part) for part in parts]
        self.text = "".join([*parts, detokenizer.flush()]) if text is None else text

    def add(self, logprobs: Sequence[TokenLogprob]) -> None:
        """Take the entries of the next prompt positions."""
        self._logprobs.extend(logprobs)

    @property
    def complete(self) -> bool:
        """Whether all that was asked of the prompt is known."""
        return not self._scored or len(self._logprobs) >= len(self._ids) - 1

    def tokens(self) -> tuple[ScoredToken, ...]:
        """The prompt's tokens, if asked."""
        if not self._scored:
            return ()
        offset, scored = 0, []
        entries = [TokenLogprob(self._ids[0], 0.0), *self._logprobs]
        for place, (entry, length) in enumerate(zip(entries, self._lengths, strict=True)):
            scored.append(score(self._tokenizer, entry, offset, known=place > 0))
            offset += length
        return tuple(scored)


def score(tokenizer: Tokenizer, entry: TokenLogprob, offset: int, known: bool = True) -> ScoredToken:
    """An engine's entry in words."""
    return ScoredToken(
        data=tokenizer.token_bytes(entry.token_id),
        shows=tokenizer.has_text(entry.token_id),
        logprob=entry.logprob if known else None,
        top=tuple((tokenizer.token_bytes(token_id), logprob) for token_id, logprob in entry.top),
        offset=offset,
        id=entry.token_id,
        top_ids=tuple(token_id for token_id, _ in entry.top),
    )


class Choice:
    """One continuation as text. A token's entry goes out with the first of its text that does."""

    def __init__(
        self,
        index: int,
        tokenizer: Tokenizer,
        stops: StopStrings,
        scored: bool,
        echo: Echo | None = None,
        parser: OutputParser | None = None,
        lines: LineLimit | None = None,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.num_reasoning = 0
        self.num_cached = 0
        self.finished = False
        self._parser = parser or PlainOutput()
        self._calls_tools = False
        self.tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(shown=self._parser.shown)
        self._content = ContentEnd(stops, lines or LineRules().limit())
        self._scored = scored
        self._echo = echo
        self._decoded = 0 if echo is None else len(echo.text)
        self._waiting: deque[ScoredToken] = deque()
        self._new_ids: list[int] = []

    def start(self) -> list[Delta]:
        """What can be said before any event."""
        if self._echo is None or not self._echo.complete:
            return []
        echo, self._echo = self._echo, None
        return [Delta(self.index, echo.text, echo.tokens())]

    def feed(self, event: TokenEvent) -> list[Delta]:
        """The deltas that an event brings. Raises GenerationError where the engine gave the request up."""
        if event.finish_reason in ("error", "abort"):
            raise GenerationError(event.error or "the engine ended the request")
        self.num_tokens += len(event.token_ids)
        self.num_cached = event.num_cached or self.num_cached
        self._new_ids += event.token_ids
        if self._echo is not None:
            self._echo.add(event.prompt_logprobs)
        deltas = self.start()
        if event.num_computed is not None:
            deltas.append(Delta(self.index, num_prefilled=event.num_computed))
        pieces: list[Piece] = []
        end = self._take(event, pieces)
        if end is not None:
            return [*deltas, *self._finish(pieces, end)]
        if event.finish_reason is not None:
            end = End("length" if event.finish_reason == "length" else "stop")
            return [*deltas, *self._finish(pieces, end)]
        return [*deltas, *self._deltas(pieces, self._release())]

    def _take(self, event: TokenEvent, pieces: list[Piece]) -> End | None:
        """Add the pieces that an event sets free; why they end the answer if so. A stop token has no text."""
        ids = event.token_ids[:-1] if event.finish_reason == "stop" else event.token_ids
        for place, token_id in enumerate(ids):
            if self._scored:
                self._waiting.append(score(self.tokenizer, event.logprobs[place], self._decoded))
            end = self._read(self._detokenizer.feed(token_id), pieces)
            if end is not None:
                return end
        if event.finish_reason is None:
            return None
        end = self._read(self._detokenizer.flush(), pieces) or self._add(self._parser.flush(), pieces)
        if end is None:
            pieces.append(Piece(self._content.release()))
        return end

    def _read(self, text: str, pieces: list[Piece]) -> End | None:
        """Add what a token's text sets free."""
        self._decoded += len(text)
        reasons = self._parser.in_reasoning
        end = self._add(self._parser.feed(text), pieces)
        self.num_reasoning += reasons or self._parser.in_reasoning
        return end

    def _add(self, new: Sequence[Piece], pieces: list[Piece]) -> End | None:
        """Add pieces to the end of the content, if that comes. Reasoning and calls have no such end."""
        for piece in new:
            if not piece.text:
                pieces += (Piece(self._content.release()), piece)
                continue
            text, end = self._content.feed(piece.text)
            pieces.append(Piece(text))
            if end is not None:
                return end
        return None

    def _deltas(self, pieces: Sequence[Piece], tokens: tuple[ScoredToken, ...]) -> list[Delta]:
        """A delta for each piece; the first of them has the tokens."""
        deltas = []
        for piece in joined(pieces) or ([Piece()] if tokens else []):
            self._calls_tools = self._calls_tools or piece.tool_call is not None
            deltas.append(
                Delta(
                    self.index,
                    piece.text,
                    tokens,
                    reasoning=piece.reasoning,
                    tool_call=piece.tool_call,
                    token_ids=self._take_ids(),
                )
            )
            tokens = ()
        return deltas

    def _take_ids(self) -> tuple[int, ...]:
        ids, self._new_ids = tuple(self._new_ids), []
        return ids

    def _finish(self, pieces: Sequence[Piece], end: End) -> list[Delta]:
        """The last deltas. Tokens are left out whose text was cut off."""
        self.finished = True
        is_whole = not self._content.num_held
        tokens = (*self._release(), *(self._waiting if is_whole else ()))
        deltas = self._deltas(pieces, tokens) or [Delta(self.index, token_ids=self._take_ids())]
        calls_tools = end.reason == "stop" and self._calls_tools
        reason: Finish = "tool_calls" if calls_tools else end.reason
        return [*deltas[:-1], replace(deltas[-1], finish_reason=reason, stop_string=end.stop_string)]

    def _release(self) -> tuple[ScoredToken, ...]:
        """The tokens of which some text is neither held back nor cut off."""
        released = self._decoded - self._content.num_held
        tokens = []
        while self._waiting and self._waiting[0].offset < released:
            tokens.append(self._waiting.popleft())
        return tuple(tokens)
