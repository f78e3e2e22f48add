"""A chat with a model through a daemon: the messages so far, and one answer at a time. Knows no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from quantd.daemon.cli.client import DaemonClient


@dataclass(frozen=True)
class Answer:
    """One answer. Times in seconds since the question was sent; usage as OpenAI counts it."""

    text: str
    finish_reason: str | None
    usage: dict[str, Any]
    first_seconds: float
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """The rate after the first token; 0 where there is no second."""
        num_further = self.usage.get("completion_tokens", 0) - 1
        return num_further / (self.seconds - self.first_seconds) if num_further > 0 else 0.0

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache held."""
        cached: int = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return cached

    @property
    def summary(self) -> str:
        """Counts and speed in one line."""
        prompt_tokens, tokens = (self.usage.get(f"{part}_tokens", 0) for part in ("prompt", "completion"))
        return (
            f"{prompt_tokens} prompt tokens ({self.cached_tokens} cached), first token after "
            f"{1000 * self.first_seconds:.0f} ms; {tokens} tokens at {self.tokens_per_second:.1f} tok/s; "
            f"ended by {self.finish_reason}"
        )


@dataclass
class Conversation:
    """`sampling` holds the request fields that the user set, by their API names."""

    client: DaemonClient
    model: str
    system: str | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)

    def ask(self, prompt: str, write: Callable[[str], object]) -> Answer:
        """Send the prompt and hand the answer's text to `write` as it comes.

        Ctrl-C closes the connection, which stops the model. What was answered until then, or until an
        error, stays in the conversation; a question that got nothing does not. Raises DaemonError.
        """
        parts: list[str] = []
        self.messages.append({"role": "user", "content": prompt})
        try:
            return self._stream(parts, write)
        finally:
            if parts:
                self.messages.append({"role": "assistant", "content": "".join(parts)})
            else:
                self.messages.pop()

    def _stream(self, parts: list[str], write: Callable[[str], object]) -> Answer:
        started = time.monotonic()
        first, finish_reason = 0.0, None
        usage: dict[str, Any] = {}
        with closing(self.client.events("/v1/chat/completions", self._body())) as events:
            for event in events:
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    finish_reason = choice.get("finish_reason") or finish_reason
                    if text := choice["delta"].get("content"):
                        first = first or time.monotonic() - started
                        parts.append(text)
                        write(text)
        return Answer("".join(parts), finish_reason, usage, first, time.monotonic() - started)

    def _body(self) -> dict[str, Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return {
            "model": self.model,
            "messages": system + self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.sampling,
        }
