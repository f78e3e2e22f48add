"""llama-server's request bodies, parsed strictly (llama.cpp, tools/server/README.md)."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from quantd.daemon.embeddings import EmbeddingRequest
from quantd.daemon.infill import InfillText, SourceFile
from quantd.daemon.requests import CompletionRequest, InfillRequest
from quantd.daemon.tokenizer import Tokenizer
from quantd.daemon.wire.body import texts_or_ids
from quantd.daemon.wire.llama_server_options import OptionFields
from quantd.engine.errors import RequestError

_MAX_PROMPTS = 128


class CompletionBody(OptionFields, frozen=True, kw_only=True):
    """/completion"""

    prompt: str | list[Any] | dict[str, Any]

    def neutral(self) -> CompletionRequest:
        """The neutral request. Raises RequestError."""
        return CompletionRequest(model=self.model, prompts=_prompts(self.prompt), options=self.options())


class ExtraFile(msgspec.Struct, frozen=True):
    """A part of another file."""

    text: str
    filename: str | None = None


class InfillBody(OptionFields, frozen=True, kw_only=True):
    """/infill: where all does not fit, the oldest of input_extra are left out, which its clients count on."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str | None = None

    def neutral(self) -> InfillRequest:
        """The neutral request. Raises RequestError."""
        files = [SourceFile(extra.filename or "tmp", extra.text) for extra in self.input_extra or ()]
        text = InfillText(
            prefix=self.input_prefix, suffix=self.input_suffix, middle=self.prompt or "", files=files
        )
        return InfillRequest(model=self.model, text=text, trims_files=True, options=self.options())


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """/tokenize"""

    content: str
    model: str | None = None
    add_special: bool | None = None
    parse_special: bool | None = None
    with_pieces: bool | None = None

    def tokens(self, tokenizer: Tokenizer) -> list[int] | list[dict[str, Any]]:
        """The answer: ids, or ids with their pieces, as bytes where they are no text."""
        if self.parse_special is False:
            ids = [*(tokenizer.head if self.add_special else ()), *tokenizer.encode_text(self.content)]
        else:
            ids = tokenizer.encode(self.content, raw=bool(self.add_special))
        if not self.with_pieces:
            return ids
        return [{"id": token_id, "piece": _piece(tokenizer.token_bytes(token_id))} for token_id in ids]


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """/detokenize"""

    tokens: list[int]
    model: str | None = None

    def check(self, vocab_size: int) -> None:
        """Raise RequestError for what is no token."""
        for token_id in self.tokens:
            if not 0 <= token_id < vocab_size:
                raise RequestError(f"tokens: token id {token_id} is not in 0..{vocab_size - 1}", "tokens")


class PropsQuery(msgspec.Struct, frozen=True):
    """/props. autoload: whether a model is loaded for it."""

    model: str | None = None
    autoload: bool | None = None


class SlotsQuery(msgspec.Struct, frozen=True):
    """/slots. fail_on_no_slot: whether it is an error that all are taken."""

    model: str | None = None
    fail_on_no_slot: bool | None = None


class SlotQuery(msgspec.Struct, frozen=True):
    """/slots/{id}"""

    action: Literal["save", "restore", "erase"]


class SlotBody(msgspec.Struct, frozen=True, kw_only=True):
    """/slots/{id}: the name of the file to save to or restore from."""

    filename: str | None = None
    model: str | None = None


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """/embedding"""

    content: str | list[Any] | None = None
    input: str | list[Any] | None = None
    model: str | None = None
    embd_normalize: int | None = None

    def neutral(self) -> EmbeddingRequest:
        """The neutral request. Raises RequestError."""
        if self.embd_normalize not in (None, -1, 2):
            raise RequestError("embd_normalize: only -1 and 2 are supported", "embd_normalize")
        name = "content" if self.input is None else "input"
        inputs = texts_or_ids(getattr(self, name) or [], name)
        normalize = self.embd_normalize != -1
        return EmbeddingRequest(model=self.model, inputs=inputs, normalize=normalize)


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


def _prompts(prompt: str | list[Any] | dict[str, Any]) -> list[str | list[int | str]]:
    """One prompt, or a list of them, each a text, token ids, pieces of both, or an object with a text.

    A list of ids, or of ids and texts, is one prompt; a list of texts are several.
    """
    if not isinstance(prompt, list) or any(type(item) is int for item in prompt):
        return [_prompt(prompt)]
    if not 1 <= len(prompt) <= _MAX_PROMPTS:
        raise RequestError(f"prompt must hold 1 to {_MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    return [_prompt(item) for item in prompt]


def _prompt(prompt: object) -> str | list[int | str]:
    match prompt:
        case str():
            return prompt
        case {"multimodal_data": data} if data:
            raise RequestError("prompt.multimodal_data is not supported, only text is", "prompt")
        case {"prompt_string": str(text)}:
            return text
        case list(pieces) if pieces and all(type(item) in (int, str) for item in pieces):
            return pieces
    raise RequestError(
        "prompt must be a text, token ids and texts, or an object with prompt_string, or a list of such",
        "prompt",
    )
