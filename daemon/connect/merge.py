"""Settings put into a document beside those of its owner, and taken out again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, UnsetType

from quantd.daemon.connect.document import Document, Path, name_of
from quantd.daemon.errors import ConfigError

Role: TypeAlias = Literal["setting", "choice", "frame", "stamp"]


class Put(NamedTuple):
    """A setting that a file should hold, and how it stands to what its owner has.

    setting: has to hold; a table as its value means the entries, beside others there.
    choice: put only where none was made; `hint` says how to make it by hand.
    frame: put only where it lacks, for the file to be valid; stays in a file that was changed since.
    stamp: as a frame, but goes with what it belongs to, whatever the program has made of it.
    """

    path: Path
    value: Any
    role: Role = "setting"
    hint: str = ""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """A setting that was put into a document, and the value that was there before."""

    path: Path
    value: Any
    role: Role = "setting"
    old: Any | UnsetType = UNSET


def merge(document: Document, puts: Iterable[Put], replace: bool) -> tuple[list[Change], list[str]]:
    """Make the settings hold; what was changed for it, and in words the choices that were left standing.

    Raises ConfigError for a setting that has another value, unless `replace`.
    """
    changes, kept = [], []
    for path, value, role, hint in _leaves(puts):
        old = document.get(path)
        if old == value:
            continue
        if old is not UNSET and role != "setting":
            kept += [f"{name_of(path)} stays {_words(old)}: {hint}"] if role == "choice" else []
            continue
        if old is not UNSET and not replace:
            now, then = _words(old), _words(value)
            raise ConfigError(f"{name_of(path)} is {now} already; --replace makes it {then}")
        document.set(path, value)
        changes.append(Change(path, value, role, old))
    return changes, kept


def revert(document: Document, changes: Iterable[Change]) -> list[str]:
    """Put back what changes replaced; the names of those settings that were changed again, which stay."""
    changed_since = []
    for change in reversed([change for change in changes if change.role != "frame"]):
        now = document.get(change.path)
        if now == change.value or change.role == "stamp":
            _put_back(document, change)
        elif now != change.old and change.role == "setting":
            changed_since.append(name_of(change.path))
    return changed_since


def _put_back(document: Document, change: Change) -> None:
    if change.old is UNSET:
        document.remove(change.path)
    else:
        document.set(change.path, change.old)


def _leaves(puts: Iterable[Put]) -> Iterator[Put]:
    """Tables taken apart, save those that are one choice."""
    for put in puts:
        if isinstance(put.value, dict) and put.value and put.role == "setting":
            yield from _leaves(Put((*put.path, key), value) for key, value in put.value.items())
        else:
            yield put


def _words(value: object) -> str:
    """A value as it is told to people: on one line, and not all of a long one."""
    words = " ".join(msgspec.json.encode(value, enc_hook=str).decode().split())
    return words if len(words) <= 60 else f"{words[:57]}..."
