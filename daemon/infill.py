"""Completion towards a suffix: prompts from a layout, in tokens.

A layout is written as model cards write it: control tokens by name, `{prefix}` and `{suffix}` for the text
around the cursor, `{middle}` for what already stands after it, `{files}` for other files of the repository.
What users send is text, also where it spells a control token.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from quantd.daemon.tokenizer import Tokenizer


@dataclass(frozen=True)
class SourceFile:
    """Another file, or a part of one, of the repository."""

    path: str
    text: str


@dataclass(frozen=True, kw_only=True)
class InfillText:
    """What is around the cursor.

    middle: text that stands between prefix and cursor, which the answer goes on from; what is before it
    may stay the same for many requests. files: oldest first.
    """

    prefix: str
    suffix: str
    middle: str = ""
    files: Sequence[SourceFile] = ()


@dataclass(frozen=True)
class Control:
    """A control token by name."""

    name: str


@dataclass(frozen=True)
class Text:
    """A piece of text. begins: whether a tokenizer that puts a space before a text does so here."""

    text: str
    begins: bool = False


Part = Control | Text

_CONTROL = re.compile(r"▁?<[^<>\s]+>|\[(?:PREFIX|SUFFIX)\]")


@dataclass(frozen=True)
class InfillFormat:
    """One family's layouts.

    alone: for a file by itself. among: for a file among others, each of which is laid out as `other`.
    ends: tokens that end an answer, beside those of the layouts, if the tokenizer has them. stops: texts
    that end an answer where there are other files. marks: tokens that tell the family from another with
    the same layouts.
    """

    family: str
    alone: str
    among: str
    other: str
    ends: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()

    @cached_property
    def controls(self) -> frozenset[str]:
        """The control tokens of the layouts, all of which a model of the family has."""
        return frozenset(_CONTROL.findall(self.alone + self.among + self.other))

    def parts(self, text: InfillText) -> list[Part]:
        """The prompt, piece by piece; texts that follow each other are one."""
        fields: dict[str, Sequence[Part]] = {
            "prefix": [Text(text.prefix, begins=True)],
            "suffix": [Text(text.suffix)],
            "middle": [Text(text.middle)],
            "files": [part for file in text.files for part in self.file_parts(file)],
        }
        return _joined(_expand(self.among if text.files else self.alone, fields))

    def file_parts(self, file: SourceFile) -> list[Part]:
        """One of the other files."""
        return _expand(self.other, {"path": [Text(file.path)], "text": [Text(file.text)]})


def _expand(layout: str, fields: Mapping[str, Sequence[Part]]) -> list[Part]:
    parts: list[Part] = []
    for literal, field, _, _ in string.Formatter().parse(layout):
        parts += _literal_parts(literal)
        parts += () if field is None else fields[field]
    return parts


def _literal_parts(literal: str) -> list[Part]:
    names, texts = _CONTROL.findall(literal), _CONTROL.split(literal)
    parts: list[Part] = [Text(texts[0])]
    for name, text in zip(names, texts[1:], strict=True):
        parts += (Control(name), Text(text))
    return parts


def _joined(parts: Sequence[Part]) -> list[Part]:
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + part.text, last.begins or part.begins)
        else:
            joined.append(part)
    return [part for part in joined if part != Text("")]


@dataclass(frozen=True)
class InfillPrompt:
    """A prompt in tokens. num_left_out: files that had no room in it."""

    ids: list[int]
    num_left_out: int = 0


class InfillWriter:
    """Writes prompts of one format in tokens of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer, format: InfillFormat) -> None:
        self.format = format
        self._tokenizer = tokenizer
        self._controls = {name: self._id(name) for name in format.controls}
        ends = [self._tokenizer.token_id(name) for name in format.ends]
        self.stop_ids = (*self._controls.values(), *(end for end in ends if end is not None))

    def _id(self, name: str) -> int:
        token_id = self._tokenizer.token_id(name)
        assert token_id is not None, f"a tokenizer of {self.format.family} has no {name}"
        return token_id

    def prompt(self, text: InfillText) -> InfillPrompt:
        """The prompt with all files."""
        return InfillPrompt([*self._tokenizer.head, *self._encode(self.format.parts(text))])

    def fitted(self, text: InfillText, limit: int) -> InfillPrompt:
        """The prompt without the oldest files, if else it had more than `limit` tokens.

        The text around the cursor stays whole, so the prompt may yet be too long. Room is given to files in
        coarse steps, else each key typed might leave out another file and so change the prompt's beginning.
        """
        prompt = self.prompt(text)
        files = list(text.files)
        step = max(limit // 8, 1)
        while len(prompt.ids) > limit and files:
            over = -(-(len(prompt.ids) - limit) // step) * step
            while over > 0 and files:
                over -= len(self._encode(self.format.file_parts(files.pop(0))))
            prompt = self.prompt(replace(text, files=files))
        return replace(prompt, num_left_out=len(text.files) - len(files))

    def _encode(self, parts: Sequence[Part]) -> list[int]:
        ids: list[int] = []
        for part in parts:
            if isinstance(part, Control):
                ids.append(self._controls[part.name])
            else:
                ids += self._tokenizer.encode_text(part.text, not part.begins, self.stop_ids)
        return ids
