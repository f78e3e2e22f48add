"""A model's text side: tokenizer, end ids and chat template, read from the files beside its weights.

Knows nothing of weights. Files and keys are Hugging Face's: tokenizer.json, tokenizer_config.json,
generation_config.json, config.json, chat_template.jinja, additional_chat_templates/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

from quantd.daemon.control_tokens import ControlTokens
from quantd.daemon.model_files import read_json
from quantd.daemon.template_files import TOOL_USE, template_source
from quantd.daemon.templates import ChatTemplate, Renderer
from quantd.daemon.text import (
    IncrementalDetokenizer,
    byte_level_bytes,
    decoder_steps,
    fallback_byte,
    is_byte_level,
)
from quantd.daemon.tokenizer_file import read_tokenizer, refused_texts
from quantd.engine.errors import RequestError
from quantd.quant.errors import CheckpointError

# Tokens that end a turn. Chat models often leave theirs out of every eos_token_id.
_TURN_ENDS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|eot|>",
    "<|end_of_turn|>",
)
# Markup that some files do not call special, such as Qwen's <|fim_prefix|>.
_MARKUP = re.compile(r"<[|｜\[].+[|｜\]]>")
# A character that joins no other; what follows it begins no text (sentencepiece's users: Code Llama's
# encode_infilling, mistral-common).
_NO_START = "\u263a"
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to tokens and back for one model.

    end_ids: the ids that end an answer. template: None where the model has none. tool_template: for requests
    with tools, where the model has one of its own for them. run_guests: runs templates that are not the
    model's. control_tokens: those that no message may write.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        config: dict[str, Any],
        template: ChatTemplate | None,
        end_ids: Iterable[int],
        tool_template: ChatTemplate | None = None,
        run_guests: Renderer | None = None,
    ) -> None:
        self._core = core
        added = core.get_added_tokens_decoder()
        self._specials = {token.content for token in added.values() if token.special}
        unknown = getattr(core.model, "unk_token", None)
        self._controls = frozenset(
            token_id
            for token_id, token in added.items()
            if (token.special or _MARKUP.fullmatch(token.content)) and token.content != unknown
        )
        with refused_texts():
            self._space_first = core.encode("a", add_special_tokens=False).tokens[:1] not in (["a"], [])
            self._prefix, self._suffix = _frame(core, config)
        self._marks = {token_id: token.content for token_id, token in added.items() if token.content.strip()}
        self.control_tokens = ControlTokens(
            name for token_id, name in self._marks.items() if token_id in self._controls
        )
        decoder = json.loads(core.decoder.__getstate__()) if core.decoder else None
        self._makers = decoder_steps(decoder)
        self._byte_level = is_byte_level(decoder)
        self._pieces: dict[int, str | None] = {}
        self._bytes: dict[int, bytes] = {}
        self._special_tokens = _special_tokens(config)
        self.template = template
        self.tool_template = tool_template
        self._run_guests = run_guests
        self.end_ids = frozenset(end_ids)

    @classmethod
    def load(cls, folder: Path, run: Renderer | None = None, run_guests: Renderer | None = None) -> Tokenizer:
        """Read a model folder. Raises CheckpointError naming the file that is missing or not valid.

        run: runs the model's chat templates, run_guests those that come with requests.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; quantd needs the tokenizer in that format"
            )
        core = read_tokenizer(file)
        core.no_truncation()
        core.no_padding()
        config = read_json(folder / "tokenizer_config.json")
        special_tokens = _special_tokens(config)
        source = template_source(folder, config)
        template = None if source is None else ChatTemplate(source, special_tokens, run)
        tool_source = template_source(folder, config, TOOL_USE)
        tool_template = None if tool_source is None else ChatTemplate(tool_source, special_tokens, run)
        end_ids = _end_ids(core, folder, special_tokens, source)
        try:
            return cls(core, config, template, end_ids, tool_template, run_guests)
        except RequestError as error:
            raise CheckpointError(f"{file}: {error}") from error

    def encode(self, text: str, raw: bool = False, spelled: Collection[int] = frozenset()) -> list[int]:
        """Tokens of a text; special tokens written in it count as such.

        spelled: places where a control token begins that is only text. raw: the text is no rendered template,
        so the tokenizer's own first tokens go before it, unless it starts with them already.
        """
        if spelled:
            return self._encode_spelled(text, spelled)
        # Unlike `encode` it gives the interpreter to other threads meanwhile, and counts no characters.
        with refused_texts():
            ids: list[int] = self._core.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if raw and ids[: len(self._prefix)] != self._prefix:
            return self._prefix + ids
        return ids

    def _encoding(self, text: str) -> tokenizers.Encoding:
        """Tokens with their places in a text, without any around it."""
        with refused_texts():
            return self._core.encode_batch([text], add_special_tokens=False)[0]

    def _encode_spelled(self, text: str, spelled: Collection[int]) -> list[int]:
        encoding = self._encoding(text)
        ids: list[int] = []
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._controls and any(place in spelled for place in range(start, end)):
                ids += self.encode_text(text[start:end], continues=True)
            else:
                ids.append(token_id)
        return ids

    def encode_text(
        self, text: str, continues: bool = False, controls: Collection[int] = frozenset()
    ) -> list[int]:
        """Tokens of a text of a user: what spells a special token in it is text like the rest.

        continues: the text goes on from another, so no space is put before it, as some tokenizers do at
        the start of a text. controls: more tokens that are to come of no text.
        """
        controls = self._controls.union(controls)
        ids = self._encode_part(text, continues)
        cuts = [] if controls.isdisjoint(ids) else self._cuts(text, controls)
        if not cuts:
            return ids
        parts = [text[start:end] for start, end in pairwise((0, *cuts, len(text)))]
        first = self.encode_text(parts[0], continues, controls)
        return first + [token_id for part in parts[1:] for token_id in self.encode_text(part, True, controls)]

    def _encode_part(self, text: str, continues: bool) -> list[int]:
        if not continues or not self._space_first:
            return self.encode(text)
        return self.encode(_NO_START + text)[len(self.encode(_NO_START)) :]

    def _cuts(self, text: str, controls: Collection[int]) -> list[int]:
        """A place within each special token that a text spells. One of a single character stays whole."""
        cuts = []
        encoding = self._encoding(text)
        for token_id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            # A token may take the spaces around it along.
            word = text[start:end].strip()
            if token_id in controls and len(word) > 1:
                cuts.append(text.index(word, start) + 1)
        return cuts

    def special_names(self, texts: Iterable[str]) -> frozenset[str]:
        """The special tokens that these texts spell."""
        parts = (part for text in texts for part in self.split_added(text))
        return frozenset(self._marks[part] for part in parts if isinstance(part, int)) & self._specials

    def token_id(self, name: str) -> int | None:
        """The id of the token with this very name, such as a control token's."""
        token_id: int | None = self._core.token_to_id(name)
        return token_id

    @property
    def head(self) -> list[int]:
        """The tokens that go before a raw prompt."""
        return list(self._prefix)

    def encode_framed(self, text: str, max_len: int | None = None) -> list[int]:
        """Tokens of a whole text with those that the tokenizer puts before and behind one, if they lack.

        max_len: the text is cut so that all are so many at most.
        """
        ids = self.encode(text, raw=True)
        suffix = self._suffix
        if suffix and ids[-len(suffix) :] != suffix:
            ids = ids + suffix
        if max_len is not None and len(ids) > max_len:
            return ids[: max_len - len(suffix)] + suffix
        return ids

    def chat_template(self, source: str) -> ChatTemplate:
        """A template with this model's special tokens. Raises CheckpointError where it is no valid Jinja."""
        return ChatTemplate(source, self._special_tokens, self._run_guests)

    def split_added(self, text: str) -> Iterator[str | int]:
        """A text cut at the tokenizer's added tokens, special or not, which are given by id.

        Added tokens of white space are taken as text.
        """
        encoding, end = self._encoding(text), 0
        for token_id, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token_id in self._marks:
                if start > end:
                    yield text[end:start]
                yield token_id
                end = stop
        if end < len(text):
            yield text[end:]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of a whole list, no clean-up of spaces. special: special tokens by name, else skipped."""
        with refused_texts():
            return self._core.decode(list(ids), skip_special_tokens=not special)

    def detokenizer(
        self, at_start: bool = False, shown: frozenset[str] = frozenset()
    ) -> IncrementalDetokenizer:
        """A new incremental detokenizer.

        at_start: False for text that goes on from a prompt. shown: special tokens that are text here.
        """
        if not shown:
            return IncrementalDetokenizer(self._makers, self._piece, at_start)

        def piece_of(token_id: int) -> str | None:
            piece = self._piece(token_id)
            name = self._core.id_to_token(token_id) if piece is None else None
            return name if name in shown else piece

        return IncrementalDetokenizer(self._makers, piece_of, at_start)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to a running text; a special token's name."""
        if token_id not in self._bytes:
            self._bytes[token_id] = self._token_bytes(token_id)
        return self._bytes[token_id]

    def _token_bytes(self, token_id: int) -> bytes:
        piece = self._core.id_to_token(token_id) or ""
        if piece in self._specials:
            return piece.encode()
        if self._byte_level:
            return byte_level_bytes(piece)
        byte = fallback_byte(piece)
        if byte is not None:
            return bytes([byte])
        detokenizer = self.detokenizer()
        return (detokenizer.feed(token_id) + detokenizer.flush()).encode()

    def has_text(self, token_id: int) -> bool:
        """Whether a token may show in a text, as special and unknown ones do not."""
        return self._piece(token_id) is not None

    def _piece(self, token_id: int) -> str | None:
        try:
            return self._pieces[token_id]
        except KeyError:
            piece = self._core.id_to_token(token_id)
            self._pieces[token_id] = None if piece in self._specials else piece
            return self._pieces[token_id]


def _frame(core: tokenizers.Tokenizer, config: dict[str, Any]) -> tuple[list[int], list[int]]:
    """What goes before a raw text and behind one that ends.

    add_bos_token and add_eos_token say, else what the tokenizer's post-processor adds.
    """
    bare = core.encode("a", add_special_tokens=False).ids
    framed = core.encode("a", add_special_tokens=True).ids
    start = next((i for i in range(len(framed) + 1) if framed[i : i + len(bare)] == bare), None)
    if start is None:
        raise RequestError("its post-processor does not keep the tokens of a text")
    prefix, suffix = framed[:start], framed[start + len(bare) :]
    return _said(core, config, "bos", prefix), _said(core, config, "eos", suffix)


def _said(core: tokenizers.Tokenizer, config: dict[str, Any], name: str, added: list[int]) -> list[int]:
    """What the configuration says of adding the token `name`, if anything; else `added`."""
    adds = config.get(f"add_{name}_token")
    if not isinstance(adds, bool):
        return added
    token_id = core.token_to_id(_text_of(config.get(f"{name}_token")) or "")
    return [token_id] if adds and token_id is not None else []


def _end_ids(
    core: tokenizers.Tokenizer, folder: Path, special_tokens: dict[str, str], template: str | None
) -> set[int]:
    """The union of what tokenizer, generation config, config and template name as ends."""
    specials = {token.content for token in core.get_added_tokens_decoder().values() if token.special}
    specials |= {special_tokens.get("eos_token", "")}
    names = [name for name in _end_names(special_tokens, template) if name in specials]
    ids = {token_id for name in names if (token_id := core.token_to_id(name)) is not None}
    config = read_json(folder / "config.json")
    for source in (config, config.get("text_config"), read_json(folder / "generation_config.json")):
        ids |= _id_list(source.get("eos_token_id")) if isinstance(source, dict) else set()
    return ids


def end_names(config: dict[str, Any], template: str | None) -> list[str]:
    """The tokens that end an answer, as tokenizer_config.json and the template name them."""
    return _end_names(_special_tokens(config), template)


def _end_names(special_tokens: dict[str, str], template: str | None) -> list[str]:
    turn_ends = [name for name in _TURN_ENDS if name in (template or "")]
    return list(dict.fromkeys(name for name in (special_tokens.get("eos_token"), *turn_ends) if name))


def _id_list(value: object) -> set[int]:
    values = value if isinstance(value, list) else [value]
    return {item for item in values if type(item) is int and item >= 0}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    named = {name: _text_of(config.get(name)) for name in _SPECIAL_NAMES}
    return {name: text for name, text in named.items() if text is not None}


def _text_of(token: object) -> str | None:
    """A special token is written as its text, or as a record with the text in `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
