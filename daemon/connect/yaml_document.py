"""YAML, changed by lines: what is not ours keeps its bytes.

ruamel.yaml parses it and tells where each node stands. Its round trip would do all of this, but puts a
comment behind a list, which belongs to what comes next, between the list's items.
"""

from __future__ import annotations

import io
import itertools
import json
import textwrap
from dataclasses import dataclass
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from quantd.daemon.connect.document import Item, Path, TreeDocument, is_hollow
from quantd.daemon.errors import ConfigError

_INDENT = 2
_NO_FOLDING = 2**30


class YamlDocument(TreeDocument):
    """A YAML file of one document. `root` is its plain data, read again after each change."""

    def __init__(self, text: str) -> None:
        super().__init__(None)
        self._read(text)

    def text(self) -> str:
        return self._text

    def set(self, path: Path, value: object) -> None:
        self.get(path)
        entries = self._entries(path)
        rest = path[len(entries) - 1 :]
        if entries[-1].is_alias:
            raise _alias_at(entries[-1].head)
        if not rest:
            self._splice(*_span(entries[-1].node), json.dumps(value, ensure_ascii=False))
        elif _is_empty(entries[-1].node):
            self._fill(entries, _nest(rest, value))
        else:
            self._extend(entries[-1].node, _nest(rest, value))

    def remove(self, path: Path) -> None:
        entries = self._entries(path)
        if len(entries) <= len(path):
            return
        depth = len(path)
        while depth > 1 and self._is_all(path[:depth]):
            depth -= 1
        parent, entry = entries[depth - 1].node, entries[depth]
        self._splice(*(self._flow_span if parent.flow_style else self._block_span)(parent, entry), "")

    def _is_all(self, path: Path) -> bool:
        """Whether what a path leads to is all that its container holds."""
        return is_hollow(_without(self.get(path[:-1]), path[-1]), path[-2])

    def _read(self, text: str) -> None:
        try:
            self.root = YAML(typ="safe", pure=True).load(text)
            self._node: Node | None = YAML().compose(text)
        except YAMLError as error:
            raise ConfigError(_reason(error)) from None
        self._text = text

    def _splice(self, start: int, end: int, text: str) -> None:
        self._read(self._text[:start] + text + self._text[end:])

    def _entries(self, path: Path) -> list[_Entry]:
        """The root and what the steps of a path lead to, as far as they lead anywhere."""
        entries = [_Entry(self._node, self._node)]
        for step in path:
            if entries[-1].is_alias:
                raise _alias_at(entries[-1].head)
            found = _find(entries[-1].node, step)
            if found is None or _is_null(found.node):
                return entries if found is None else [*entries, found]
            entries.append(found)
        return entries

    def _fill(self, entries: list[_Entry], value: object) -> None:
        """Put a value where there is nothing yet, null or an empty container."""
        head, node = entries[-1].head, entries[-1].node
        if len(entries) == 1:
            start, end = (0, 0) if node is None else _span(node)
            rest = self._text[:start] + self._text[end:]
            self._insert(rest if rest.strip() else "", len(rest), _block(value, 0))
            return
        start, end = _span(node)
        if start == end:
            start = end = head.end_mark.index + 1
        if entries[-2].node.flow_style:
            self._splice(start, end, " " + json.dumps(value, ensure_ascii=False))
            return
        kept = self._text[:start].rstrip(" ")
        text = kept + self._text[end:]
        self._insert(text, _line_end(text, len(kept)), _block(value, _column(head) + _INDENT))

    def _extend(self, node: Any, value: Any) -> None:
        """Add the one entry of `value` to a container that has some."""
        if node.flow_style:
            end = node.end_mark.index - 1
            comma = "" if self._text[:end].rstrip().endswith(",") else ", "
            self._splice(end, end, comma + json.dumps(value, ensure_ascii=False)[1:-1])
            return
        _check_items(node)
        first = node.value[0]
        column = _column(first[0]) if isinstance(node, MappingNode) else self._dash(first) - self._line(first)
        self._insert(self._text, _line_end(self._text, _end(node)), _block(value, column))

    def _insert(self, text: str, at: int, lines: str) -> None:
        before = text[:at] if not text[:at] or text[:at].endswith("\n") else text[:at] + "\n"
        self._read(before + lines + text[at:])

    def _block_span(self, parent: Node, entry: _Entry) -> tuple[int, int]:
        """The lines of an entry; of the first key behind a dash, all up to the next key."""
        start = entry.head.start_mark.index if isinstance(parent, MappingNode) else self._dash(entry.head)
        line = self._line(entry.head)
        if self._text[line:start].strip():
            return start, parent.value[1][0].start_mark.index
        return line, _line_end(self._text, _end_of(entry))

    def _flow_span(self, parent: Node, entry: _Entry) -> tuple[int, int]:
        _check_items(parent)
        entries = list(map(_entry_of, parent.value))
        index = entries.index(entry)
        if any(entry.is_alias for entry in entries[index - 1 : index + 1]):
            raise _alias_at(entry.head)
        if index + 1 < len(entries):
            return entry.head.start_mark.index, entries[index + 1].head.start_mark.index
        return _end_of(entries[index - 1]), _end_of(entry)

    def _line(self, node: Node) -> int:
        return int(node.start_mark.index - node.start_mark.column)

    def _dash(self, item: Node) -> int:
        return self._text.rindex("-", 0, item.start_mark.index + 1)


@dataclass(frozen=True)
class _Entry:
    """What a step leads to. head: the key's node, or the item's own."""

    head: Any
    node: Any

    @property
    def is_alias(self) -> bool:
        """Whether a key's value is one, whose marks are those of what it stands for, further up."""
        return self.node is not None and self.node.end_mark.index < self.head.end_mark.index


def _entry_of(member: Any) -> _Entry:
    return _Entry(*member) if isinstance(member, tuple) else _Entry(member, member)


def _find(node: Any, step: str | Item) -> _Entry | None:
    for member in node.value if isinstance(node, MappingNode | SequenceNode) else ():
        entry = _entry_of(member)
        if isinstance(step, Item):
            named = _find(entry.node, step.key)
            if named is not None and named.node.value == step.value:
                return entry
        elif entry.head.value == step:
            return entry
    return None


def _is_null(node: Any) -> bool:
    return isinstance(node, ScalarNode) and str(node.tag).endswith(":null")


def _is_empty(node: Any) -> bool:
    return node is None or _is_null(node) or (isinstance(node, MappingNode | SequenceNode) and not node.value)


def _column(node: Node) -> int:
    return int(node.start_mark.column)


def _span(node: Node) -> tuple[int, int]:
    return node.start_mark.index, _end(node)


def _end(node: Any) -> int:
    """Where a node's own text ends; a block's mark is behind the comments that follow it."""
    if isinstance(node, ScalarNode) or node.flow_style:
        return int(node.end_mark.index)
    _check_items(node)
    return _end_of(_entry_of(node.value[-1]))


def _end_of(entry: _Entry) -> int:
    """The same of an entry; of an alias or nothing, in the line of its key."""
    is_blank = entry.node.start_mark.index == entry.node.end_mark.index
    return int(entry.head.end_mark.index) if is_blank or entry.is_alias else _end(entry.node)


def _check_items(node: Node) -> None:
    """Raises ConfigError for a list with aliases as items: nothing tells where those stand."""
    if isinstance(node, SequenceNode):
        starts = [item.start_mark.index for item in node.value]
        if starts[0] < node.start_mark.index or any(a >= b for a, b in itertools.pairwise(starts)):
            raise _alias_at(node)


def _alias_at(node: Node) -> ConfigError:
    return ConfigError(f"line {node.start_mark.line + 1}: an alias (*) is where quantd would write")


def _line_end(text: str, index: int) -> int:
    """The start of the line after an index, which may be at it already."""
    if index and text[index - 1] == "\n":
        return index
    return text.find("\n", index) + 1 or len(text)


def _nest(steps: Path, value: object) -> Any:
    """A value inside containers that the steps lead through."""
    for step in reversed(steps):
        value = {step: value} if isinstance(step, str) else [{step.key: step.value, **_as_dict(value)}]
    return value


def _as_dict(value: object) -> dict[str, Any]:
    assert isinstance(value, dict)
    return value


def _without(data: Any, step: str | Item) -> Any:
    if isinstance(step, Item):
        return [item for item in data if not (isinstance(item, dict) and item.get(step.key) == step.value)]
    return {key: value for key, value in data.items() if key != step}


def _block(value: object, column: int) -> str:
    """Lines of YAML that start at a column."""
    yaml, out = YAML(), io.StringIO()
    yaml.width = _NO_FOLDING
    yaml.indent(mapping=_INDENT, sequence=2 * _INDENT, offset=_INDENT)
    yaml.dump(value, out)
    return textwrap.indent(textwrap.dedent(out.getvalue()), " " * column)


def _reason(error: YAMLError) -> str:
    if isinstance(error, MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: not valid YAML: {error.problem}"
    return f"not valid YAML: {' '.join(str(error).split())}"
