"""Ollama's embeddings, today's and the older endpoint (ollama/ollama, api/types.go, docs/api.md).

Own rule: an input that is too long is refused unless the request itself says `truncate`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quantd.daemon.embeddings import EmbeddingRequest, Embeddings, floats
from quantd.daemon.wire.ollama import nanoseconds
from quantd.daemon.wire.ollama_request import Duration, OptionsBody, duration


class _Fields(msgspec.Struct, frozen=True, kw_only=True):
    """What both endpoints share."""

    model: str = ""
    options: OptionsBody | None = None
    keep_alive: Duration | None = None

    @property
    def stay(self) -> float | None:
        """How long the model is to stay in memory, in seconds. Raises RequestError."""
        return None if self.keep_alive is None else duration(self.keep_alive)

    def request(self, inputs: list[str | list[int]], **others: Any) -> EmbeddingRequest:
        """The neutral request. others: its fields that only one endpoint has. Raises RequestError."""
        bound = None if self.options is None else self.options.context_len
        return EmbeddingRequest(
            model=self.model, inputs=inputs, context_len=bound, keep_alive=self.stay, **others
        )


class EmbedBody(_Fields, frozen=True, kw_only=True):
    """POST /api/embed: vectors of length 1."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """The texts; an empty one alone is none."""
        return [*self.input] if isinstance(self.input, list) else [self.input] if self.input else []

    def neutral(self) -> EmbeddingRequest:
        """The neutral request. Raises RequestError."""
        return self.request(
            self.inputs,
            dimensions=self.dimensions or None,
            normalize=True,
            truncate=bool(self.truncate),
        )


class EmbeddingsBody(_Fields, frozen=True, kw_only=True):
    """POST /api/embeddings: one vector as the model makes it."""

    prompt: str | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        """The text, if there is one."""
        return [self.prompt] if self.prompt else []

    def neutral(self) -> EmbeddingRequest:
        """The neutral request. Raises RequestError."""
        return self.request(self.inputs)


def embed_object(model: str, embeddings: Embeddings) -> dict[str, Any]:
    """The reply of /api/embed. model: as the request names it."""
    usage = embeddings.usage
    return {
        "model": model,
        "embeddings": [vector_json(vector) for vector in embeddings.vectors],
        "total_duration": nanoseconds(usage.load_seconds + usage.prompt_seconds),
        "load_duration": nanoseconds(usage.load_seconds),
        "prompt_eval_count": usage.prompt_tokens,
    }


def vector_json(vector: bytes) -> msgspec.Raw:
    """A vector as a list of numbers."""
    return msgspec.Raw(msgspec.json.encode(floats(vector)))
