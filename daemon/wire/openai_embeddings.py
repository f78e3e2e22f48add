"""OpenAI's embeddings: their body and their reply (OpenAI API reference, embeddings).

Own rules: any number of inputs; dimensions for every model, whether or not it was trained to be cut.
"""

from __future__ import annotations

import base64
from typing import Any, Literal

import msgspec

from quantd.daemon.embeddings import EmbeddingRequest, Embeddings, floats
from quantd.daemon.wire.body import texts_or_ids
from quantd.engine.errors import RequestError


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    input: str | list[Any]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    def neutral(self) -> EmbeddingRequest:
        """The neutral request. Raises RequestError."""
        inputs = texts_or_ids(self.input, "input")
        for index, item in enumerate(inputs):
            if not item:
                raise RequestError(f"input[{index}] is empty: give at least one token", "input")
        return EmbeddingRequest(model=self.model, inputs=inputs, dimensions=self.dimensions)

    def reply(self, embeddings: Embeddings) -> dict[str, Any]:
        """The answer in the form that the body asks for; each vector is JSON already."""
        text = _base64 if self.encoding_format == "base64" else floats
        usage = embeddings.usage
        return {
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": msgspec.Raw(msgspec.json.encode(text(vector))),
                }
                for index, vector in enumerate(embeddings.vectors)
            ],
            "model": embeddings.model,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "total_tokens": usage.prompt_tokens,
                "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
            },
        }


def _base64(vector: bytes) -> str:
    return base64.b64encode(vector).decode()
