"""The prefixes on disk as people see them: a tree for each model, told by its branches.

A line stands for the blocks between two branches, or from one to an end; its id is that of the last of them.
What a prefix goes on from is a line of its own, so sizes add up. Texts are not known here: files hold none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import msgspec

from quantd.daemon.errors import PrefixNotFoundError
from quantd.daemon.store import model_name, plain_name
from quantd.engine.block_file import HEADER_BYTES, BlockFileError, decode_header
from quantd.engine.block_folder import ABOUT, PINNED, UNPINNED, About, block_files
from quantd.engine.disk_space import kind_folders

_ID_BYTES = 6


class StoredPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A line. model: name of its folder. tokens: from the start of the prompt on. bytes: of this line alone.

    used: seconds since the epoch. under: the line that it goes on from, if that is on disk.
    """

    id: str
    model: str
    kv_dtype: str
    tokens: int
    bytes: int
    used: float
    pinned: bool
    under: str | None


class Removed(msgspec.Struct, frozen=True):
    """What a removal took away. keys: of the blocks, for those that have them in memory too."""

    prefixes: int
    num_bytes: int
    keys: list[bytes]


@dataclass(eq=False)
class _Block:
    """A file. parent: the block before it, if that is on disk."""

    path: Path
    about: About
    key: bytes
    parent_key: bytes
    depth: int
    num_bytes: int
    used: float
    pinned: bool
    parent: _Block | None = None
    children: list[_Block] = field(default_factory=list)


@dataclass(eq=False)
class _Line:
    """Blocks in order, without a branch between them."""

    blocks: list[_Block]
    under: _Line | None

    @property
    def last(self) -> _Block:
        return self.blocks[-1]

    @property
    def id(self) -> str:
        """Models that share a tokenizer share keys too."""
        return blake2b(str(self.last.path).encode(), digest_size=_ID_BYTES).hexdigest()

    @property
    def model(self) -> str:
        return model_name(Path(self.last.about.model_path))


class StoredPrefixes:
    """The prefixes below `root`, which need not exist yet. All methods read files: not for an event loop."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def all(self) -> list[StoredPrefix]:
        """All lines: what goes on from a line comes behind it, the latest used first."""
        return [_describe(line) for line in self._lines()]

    def remove(
        self, ids: Collection[str] = (), model: str | None = None, everything: bool = False
    ) -> Removed:
        """Delete lines with all that goes on from them: by ids (or how they begin), of a model, or all.

        Raises PrefixNotFoundError.
        """
        lines = self._lines()
        chosen = lines if everything else [_find(lines, id) for id in ids]
        if model is not None:
            chosen = [*chosen, *_of_model(lines, plain_name(model))]
        doomed = _below(lines, chosen)
        blocks = [block for line in doomed for block in line.blocks]
        for block in blocks:
            block.path.unlink(missing_ok=True)
        return Removed(len(doomed), sum(block.num_bytes for block in blocks), [block.key for block in blocks])

    def clear(self, model: str) -> None:
        """Delete what there is of a model, which may be nothing."""
        with contextlib.suppress(PrefixNotFoundError):
            self.remove(model=model)

    def pin(self, ids: Collection[str], pinned: bool = True) -> list[StoredPrefix]:
        """Keep lines, and what they go on from, whatever else needs room.

        pinned False: that ends, for what goes on from them too. Raises PrefixNotFoundError.
        """
        lines = self._lines()
        chosen = [_find(lines, id) for id in ids]
        changed = [other for line in chosen for other in _path(line)] if pinned else _below(lines, chosen)
        for line in changed:
            for block in line.blocks:
                block.path.chmod(PINNED if pinned else UNPINNED)
                block.pinned = pinned
        return [_describe(line) for line in chosen]

    def _lines(self) -> list[_Line]:
        lines: list[_Line] = []
        for folder in kind_folders(self._root):
            blocks = {block.key: block for block in _blocks(folder)}
            for block in blocks.values():
                block.parent = blocks.get(block.parent_key)
                if block.parent is not None:
                    block.parent.children.append(block)
            roots = [block for block in blocks.values() if block.parent is None]
            lines += _branches(roots)
        return lines


def _branches(roots: Sequence[_Block]) -> list[_Line]:
    """The lines from these blocks on. No recursion: a prefix may branch at every block."""
    lines: list[_Line] = []
    waiting: list[tuple[_Block, _Line | None]] = [(block, None) for block in _latest_last(roots)]
    while waiting:
        block, under = waiting.pop()
        line = _Line([block], under)
        while len(block.children) == 1 and block.children[0].pinned == block.pinned:
            block = block.children[0]
            line.blocks.append(block)
        lines.append(line)
        waiting += [(child, line) for child in _latest_last(block.children)]
    return lines


def _latest_last(blocks: Sequence[_Block]) -> list[_Block]:
    return sorted(blocks, key=lambda block: block.used)


def _blocks(folder: Path) -> Iterator[_Block]:
    """The blocks whose headers can be read."""
    about = _about(folder)
    for entry in block_files(folder):
        path = Path(entry.path)
        try:
            found = entry.stat(follow_symlinks=False)
            if not entry.is_file(follow_symlinks=False):
                continue
            with path.open("rb") as file:
                header = decode_header(file.read(HEADER_BYTES))
        except (OSError, BlockFileError):
            continue
        yield _Block(
            path=path,
            about=about,
            key=header.key,
            parent_key=header.parent,
            depth=header.depth,
            num_bytes=found.st_size,
            used=found.st_mtime,
            pinned=not found.st_mode & 0o200,
        )


def _about(folder: Path) -> About:
    try:
        return msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except (OSError, msgspec.MsgspecError):
        return About("unknown", "unknown", 0)


def _describe(line: _Line) -> StoredPrefix:
    about = line.last.about
    return StoredPrefix(
        id=line.id,
        model=line.model,
        kv_dtype=about.kv_dtype,
        tokens=line.last.depth * about.block_size,
        bytes=sum(block.num_bytes for block in line.blocks),
        used=max(block.used for block in line.blocks),
        pinned=line.last.pinned,
        under=None if line.under is None else line.under.id,
    )


def _find(lines: Sequence[_Line], id: str) -> _Line:
    found = [line for line in lines if id and line.id.startswith(id.lower())]
    if len(found) != 1:
        reason = f"{len(found)} ids begin so" if found else "quantd cache ls shows those there are"
        raise PrefixNotFoundError(f"no prefix {id!r} is on disk: {reason}")
    return found[0]


def _of_model(lines: Sequence[_Line], model: str) -> list[_Line]:
    found = [line for line in lines if line.model == model]
    if not found:
        raise PrefixNotFoundError(f"no prefix of {model!r} is on disk")
    return found


def _path(line: _Line | None) -> Iterator[_Line]:
    """A line and all that it goes on from."""
    while line is not None:
        yield line
        line = line.under


def _below(lines: Sequence[_Line], tops: Sequence[_Line]) -> list[_Line]:
    """These and all that goes on from them. lines: what a line goes on from comes before it."""
    found = set(tops)
    for line in lines:
        if line.under in found:
            found.add(line)
    return [line for line in lines if line in found]
