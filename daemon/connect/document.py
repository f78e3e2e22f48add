"""A configuration file as a tree of settings, read and changed by paths, whatever its format.

A document keeps all that it is not told to change: comments, order, spelling.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, MutableSequence
from typing import Any, Protocol, TypeAlias

import msgspec
from msgspec import UNSET

from quantd.daemon.errors import ConfigError


class Item(msgspec.Struct, frozen=True):
    """A step of a path: the item of a list whose `key` is `value`."""

    key: str
    value: str


Path: TypeAlias = tuple[str | Item, ...]


class Document(Protocol):
    """A file's text, opened. Its maker raises ConfigError that names the line where the text is broken."""

    def get(self, path: Path) -> Any:
        """The plain value at a path; UNSET where there is none. Raises ConfigError where it cannot lead."""

    def set(self, path: Path, value: object) -> None:
        """Put a plain value at a path, making what is missing on the way. Raises ConfigError as get does."""

    def remove(self, path: Path) -> None:
        """Take away what is at a path, and what holds nothing any more without it."""

    def text(self) -> str:
        """The whole file."""


Format: TypeAlias = Callable[[str], Document]


class TreeDocument:
    """A document whose parser gives mutable mappings and sequences. `root` is None where it holds no value.

    The last step of a path is a key. null counts as not set.
    """

    def __init__(self, root: Any) -> None:
        self.root = root

    def get(self, path: Path) -> Any:
        node = self.root
        for i, step in enumerate(path):
            if node is not None:
                node = _child(node, step, path[:i])
        return UNSET if node is None else plain(node)

    def set(self, path: Path, value: object) -> None:
        *way, key = path
        if self.root is None:
            self.root = self._container(path[0], None)
        node = self.root
        for i, step in enumerate(way):
            child = _child(node, step, path[:i])
            node = self._add(node, step, path[i + 1]) if child is None else child
        _child(node, key, tuple(way))
        node[key] = value

    def remove(self, path: Path) -> None:
        nodes = [self.root]
        for i, step in enumerate(path):
            if nodes[-1] is None:
                return
            nodes.append(_child(nodes[-1], step, path[:i]))
        for i in range(len(path) - 1, -1, -1):
            _delete(nodes[i], path[i])
            if i == 0 or not is_hollow(nodes[i], path[i - 1]):
                return

    def _add(self, node: Any, step: str | Item, following: str | Item) -> Any:
        """A new container at a step that leads nowhere yet."""
        if isinstance(step, Item):
            node.append({step.key: step.value})
            return node[-1]
        node[step] = self._container(following, node)
        return node[step]

    def _container(self, step: str | Item, parent: Any) -> Any:
        """An empty container that a step can start from."""
        return [] if isinstance(step, Item) else {}


def _child(node: Any, step: str | Item, where: Path) -> Any:
    """What a step leads to; None for nothing."""
    if isinstance(step, Item):
        if not isinstance(node, MutableSequence):
            raise ConfigError(f"{name_of(where) or 'the file'} is not a list, which it has to be")
        return next((item for item in node if _is_meant(item, step)), None)
    if not isinstance(node, MutableMapping):
        raise ConfigError(f"{name_of(where) or 'the file'} does not hold settings by name, which it has to")
    return node.get(step)


def _is_meant(item: Any, step: Item) -> bool:
    return isinstance(item, MutableMapping) and item.get(step.key) == step.value


def _delete(node: Any, step: str | Item) -> None:
    if isinstance(step, Item):
        del node[next(i for i, item in enumerate(node) if _is_meant(item, step))]
    elif step in node:
        del node[step]


def is_hollow(node: Any, step: str | Item) -> bool:
    """Whether a container that a step led to holds nothing but what the step itself says."""
    return not node or (isinstance(step, Item) and list(node) == [step.key])


def plain(node: Any) -> Any:
    """The value of a node in Python's own types."""
    if isinstance(node, MutableMapping):
        return {str(key): plain(value) for key, value in node.items()}
    if isinstance(node, MutableSequence):
        return [plain(value) for value in node]
    # Parsers have subclasses of these, which remember how a value was written.
    own = next((kind for kind in (bool, int, float, str) if isinstance(node, kind)), None)
    return node if own is None else own(node)


def name_of(path: Path) -> str:
    """A path in words, such as models[quantd].roles"""
    words = "".join(f"[{step.value}]" if isinstance(step, Item) else f".{step}" for step in path)
    return words.removeprefix(".")
