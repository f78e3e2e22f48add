"""JSON with comments and trailing commas, as editors write it.

json-five parses it into a model that prints the same text again. The model's nodes hold the white space and
comments around them (`wsc`); the views here add members and take them away in the style of the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, MutableMapping, MutableSequence
from typing import Any, TypeAlias

from json5.dumper import ModelDumper
from json5.dumper import dumps as print_model
from json5.loader import DefaultLoader, ModelLoader
from json5.loader import loads as parse
from json5.model import Comment, DoubleQuotedString, JSONArray, JSONObject, JSONText, LineComment, Value
from json5.utils import JSON5DecodeError

from quantd.daemon.connect.document import Item, TreeDocument
from quantd.daemon.errors import ConfigError

_Space: TypeAlias = list[str | Comment]
_INDENT = "  "


class JsonDocument(TreeDocument):
    """A JSON file. What is added is strict JSON, save for a trailing comma where there is one."""

    def __init__(self, text: str) -> None:
        self._model = _parse(text if text.strip() else "{}\n")
        first = re.search(r"\n([ \t]+)\S", text)
        self._unit = first[1] if first else _INDENT
        super().__init__(_view(self._model.value, "", self._unit) if text.strip() else None)

    def text(self) -> str:
        return str(print_model(self._model, dumper=ModelDumper()))  # type: ignore[arg-type]

    def _container(self, step: str | Item, parent: Any) -> Any:
        made = super()._container(step, parent)
        if parent is not None:
            return made
        self._model = _parse(json.dumps(made) + "\n")
        return _view(self._model.value, "", self._unit)


def _parse(text: str) -> JSONText:
    try:
        model: JSONText = parse(text, loader=ModelLoader())
    except JSON5DecodeError as error:
        line = error.lineno or text.rstrip().count("\n") + 1
        raise ConfigError(f"line {line}: not valid JSON from here on") from None
    return model


def _view(value: Value, margin: str | None, unit: str) -> Any:
    """A container's view, or a plain value. margin as in _Members."""
    if isinstance(value, JSONObject):
        return _Object(value, margin, unit)
    if isinstance(value, JSONArray):
        return _Array(value, margin, unit)
    return DefaultLoader().load(value)


class _Members:
    """What the members of objects and arrays have in common. A member's head is its key, else its value.

    node: the model of the container. margin: the white space at the start of the line that it ends on; None
    for one inside a container that is all on one line.
    """

    def __init__(self, node: Any, heads: list[Any], margin: str | None, unit: str) -> None:
        self._node, self._heads = node, heads
        self._margin, self._unit = margin, unit

    def __len__(self) -> int:
        return len(self._heads)

    def _gap(self) -> str:
        """The white space in front of a member: a new line, save in a container that is all on one."""
        if not self._heads:
            return "" if self._margin is None else "\n" + self._margin + self._unit
        space = [*self._node.leading_wsc, *self._heads[0].wsc_before]
        lines = [part for part in space if isinstance(part, str) and "\n" in part]
        return lines[-1][lines[-1].rindex("\n") :] if lines else " "

    def _view_of(self, value: Value) -> Any:
        gap = self._gap()
        return _view(value, gap[1:] if "\n" in gap else None, self._unit)

    def _model_of(self, value: object) -> Value:
        gap = self._gap()
        text = json.dumps(value, ensure_ascii=False, indent=self._unit if "\n" in gap else None)
        return _parse(text.replace("\n", gap)).value

    def _make_room(self) -> tuple[_Space, str]:
        """The space to put before a new last member, and the one to put behind it.

        Comments behind the member that was last stay where they are, before the new line.
        """
        gap, tail = self._gap(), self._take_tail()
        end = tail.pop() if tail and isinstance(tail[-1], str) else ""
        assert isinstance(end, str)
        if "\n" not in gap:
            return [*tail, end or gap], ""
        if "\n" not in end:
            return [*tail, gap], f"\n{self._margin or ''}"
        at = end.rindex("\n")
        return [*tail, end[:at], gap], end[at:]

    def _end_with(self, value: Value, space: str) -> None:
        self._node.values.append(value)
        (self._node.trailing_comma or value).wsc_after = [space]

    def _take_tail(self) -> _Space:
        """The white space and comments between the last member, or its comma, and the end."""
        node = self._node
        if node.trailing_comma is None and not node.values:
            tail, node.leading_wsc = node.leading_wsc, []
        else:
            holder = node.trailing_comma or node.values[-1]
            tail, holder.wsc_after = holder.wsc_after, []
        return list(tail)

    def _drop(self, index: int) -> None:
        """Take a member away; comments that stand before it stay."""
        node, heads = self._node, self._heads
        before = list(heads[index].wsc_before)
        comments = before[:-1] if before and isinstance(before[-1], str) else before
        is_last = index == len(heads) - 1
        tail = self._take_tail() if is_last else []
        if not is_last:
            own = heads[index + 1].wsc_before
            heads[index + 1].wsc_before = _joined(comments, own) if _has_comment(own) else before
        for members in {id(heads): heads, id(node.values): node.values}.values():
            del members[index]
        if not node.values:
            node.trailing_comma = None
            node.leading_wsc = [*node.leading_wsc, *tail] if _has_comment(node.leading_wsc) else []
        elif is_last:
            (node.trailing_comma or node.values[-1]).wsc_after += _joined(comments, tail)


class _Object(_Members, MutableMapping[str, Any]):
    def __init__(self, node: JSONObject, margin: str | None, unit: str) -> None:
        super().__init__(node, node.keys, margin, unit)

    def _index(self, key: str) -> int:
        """Where a key is; of several the last one counts, as for all parsers."""
        names = list(self)
        return len(names) - 1 - names[::-1].index(key)

    def __getitem__(self, key: str) -> Any:
        if key not in list(self):
            raise KeyError(key)
        return self._view_of(self._node.values[self._index(key)])

    def __setitem__(self, key: str, value: object) -> None:
        made, values = self._model_of(value), self._node.values
        if key in list(self):
            old = values[self._index(key)]
            made.wsc_before, made.wsc_after = old.wsc_before, old.wsc_after
            values[self._index(key)] = made
            return
        head = DoubleQuotedString(key, json.dumps(key, ensure_ascii=False))
        head.wsc_before, end = self._make_room()
        made.wsc_before = [" "]
        self._heads.append(head)
        self._end_with(made, end)

    def __delitem__(self, key: str) -> None:
        self._drop(self._index(key))

    def __iter__(self) -> Iterator[str]:
        return (str(DefaultLoader().load(key)) for key in self._heads)


class _Array(_Members, MutableSequence[Any]):
    def __init__(self, node: JSONArray, margin: str | None, unit: str) -> None:
        super().__init__(node, node.values, margin, unit)

    def __getitem__(self, index: Any) -> Any:
        return self._view_of(self._node.values[index])

    def __setitem__(self, index: Any, value: Any) -> None:
        raise NotImplementedError("items are appended and dropped, never replaced")

    def __delitem__(self, index: Any) -> None:
        self._drop(index)

    def insert(self, index: int, value: object) -> None:
        assert index == len(self), "a list grows at its end only"
        made = self._model_of(value)
        made.wsc_before, end = self._make_room()
        self._end_with(made, end)


def _joined(first: _Space, second: _Space) -> _Space:
    """One behind the other; a comment to the end of its line has to have one."""
    is_open = bool(first) and isinstance(first[-1], LineComment)
    starts_line = bool(second) and isinstance(second[0], str) and second[0].startswith(("\n", "\r"))
    return [*first, "\n", *second] if is_open and not starts_line else [*first, *second]


def _has_comment(space: Iterable[str | Comment]) -> bool:
    return any(isinstance(part, Comment) for part in space)
