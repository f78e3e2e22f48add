"""API keys: a file of their hashes. A key itself is shown once, when it is made.

A key is 256 random bits, which no one guesses, so that a fast hash (SHA-256) is as good as a slow one; slow
ones protect passwords, which people choose.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from quantd.daemon.access.scope import Scope
from quantd.daemon.errors import KeyFileError, KeyNotFoundError
from quantd.engine.errors import RequestError

KeyScope = Literal["infer", "admin"]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PREFIX = "quantd-"


class Key(msgspec.Struct, frozen=True):
    """What is kept of a key. sha256: of its text, in hexadecimal. created: seconds since 1970."""

    name: str
    scope: KeyScope
    sha256: str
    created: float

    @property
    def allows(self) -> Scope:
        """What its holder may do."""
        return Scope.ADMIN if self.scope == "admin" else Scope.INFER


class _Content(msgspec.Struct, frozen=True):
    keys: list[Key] = []


class KeyFile:
    """The keys in a file, read again whenever it is another. It need not exist.

    All methods raise KeyFileError for a file that is damaged, or that others than its owner can change.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: tuple[int, ...] | None = None
        self._keys: Sequence[Key] = ()

    def all(self) -> Sequence[Key]:
        """The keys, in the order they were made."""
        try:
            status = self.path.stat()
        except FileNotFoundError:
            self._seen, self._keys = None, ()
            return ()
        except OSError as error:
            raise KeyFileError(f"{self.path}: cannot be read: {error.strerror}") from error
        seen = (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode, status.st_uid)
        if seen != self._seen:
            self._keys, self._seen = self._read(status), seen
        return self._keys

    def find(self, text: str) -> Key | None:
        """The key that this is. Takes the same time for any text of a length."""
        digest = _digest(text)
        matches = [key for key in self.all() if hmac.compare_digest(key.sha256.encode(), digest.encode())]
        return matches[0] if matches else None

    def add(self, name: str, scope: KeyScope = "infer") -> str:
        """Make a key; its text, which is kept nowhere. Raises RequestError for a bad or a taken name."""
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"{name[:80]!r} is no name for a key: use up to 64 letters, digits, '.', '_' and '-'", "name"
            )
        text = _PREFIX + secrets.token_urlsafe(32)
        with self._changing():
            keys = self.all()
            if any(key.name == name for key in keys):
                raise RequestError(f"there is a key {name!r} already; quantd key rm {name} first", "name")
            self._write([*keys, Key(name, scope, _digest(text), time.time())])
        return text

    def remove(self, name: str) -> None:
        """Forget a key, from the next request on. Raises KeyNotFoundError."""
        with self._changing():
            keys = self.all()
            left = [key for key in keys if key.name != name]
            if len(left) == len(keys):
                raise KeyNotFoundError(f"there is no key {name[:80]!r}; quantd key ls shows those that are")
            self._write(left)

    def _read(self, status: os.stat_result) -> Sequence[Key]:
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            raise KeyFileError(f"{self.path}: must be a file of your own; who can write it is let in")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise KeyFileError(f"{self.path}: others can change it; chmod 600 {self.path}")
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=_Content).keys
        except OSError as error:
            raise KeyFileError(f"{self.path}: cannot be read: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise KeyFileError(f"{self.path}: holds no keys: {error}; mend or remove it") from None

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """One process at a time changes the file."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise KeyFileError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)

    def _write(self, keys: list[Key]) -> None:
        fresh = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            with open(fresh, "xb", opener=_private) as file:
                file.write(msgspec.json.format(msgspec.json.encode(_Content(keys))) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            fresh.replace(self.path)
        except OSError as error:
            raise KeyFileError(f"{self.path}: cannot be written: {error.strerror}") from error
        finally:
            fresh.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
