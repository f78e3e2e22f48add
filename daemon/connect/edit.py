"""Files of other programs written, and put back as they were.

A second write starts from the file as it would be without the first: repeated, it changes nothing; with other
values, it leaves nothing of the old ones behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from quantd.daemon.connect.document import Document
from quantd.daemon.connect.files import missing_folders, read_file, remove_file, replace_file
from quantd.daemon.connect.formats import FORMATS
from quantd.daemon.connect.journal import Journal, Written
from quantd.daemon.connect.merge import Put, merge, revert
from quantd.daemon.errors import ConfigError


@dataclass(frozen=True)
class ConfigFile:
    """A file that a program reads, and the settings for it. format: a name in FORMATS.

    instead_of: a file that the program would no longer read if this one came to be.
    """

    path: Path
    format: str
    puts: Sequence[Put]
    instead_of: Path | None = None

    def preview(self) -> str:
        """The file as it is for a user who has none."""
        document = FORMATS[self.format]("")
        merge(document, self.puts, replace=False)
        return document.text()


@dataclass(frozen=True)
class Outcome:
    """What became of a file. backup: the file as it was. kept: choices of the user's that stand, in words."""

    path: Path
    done: str
    backup: Path | None = None
    kept: Sequence[str] = ()


def write(tool: str, files: Sequence[ConfigFile], journal: Journal, replace: bool) -> list[Outcome]:
    """Put the settings into the files. `replace`: also where the user has others.

    Raises ConfigError naming the file and the line or setting that is in the way, before anything is written.
    """
    records = {record.file: record for record in journal.read(tool)}
    plans = [_plan(tool, file, records.get(str(file.path)), replace) for file in files]
    for plan in plans:
        if plan.outcome.backup is not None and plan.base is not None:
            replace_file(plan.outcome.backup, plan.base)
        records[plan.record.file] = plan.record
    # First the records, so that a write cut short can be undone.
    journal.save(tool, [record for record in records.values() if record.changes])
    for plan in plans:
        if plan.new != plan.disk:
            replace_file(plan.outcome.path, plan.new)
    return [plan.outcome for plan in plans]


def undo(tool: str, journal: Journal) -> list[Outcome]:
    """Put the files back as they were; from one that was changed since, take only what was put there.

    Raises ConfigError where that itself was changed, before anything is written, or nothing was ever written.
    """
    records = journal.read(tool)
    if not records:
        raise ConfigError(f"nothing to undo: quantd connect {tool} --write has written nothing")
    states = [_State.of(record) for record in records]
    for record, state in zip(records, states, strict=True):
        if state.changed_since:
            was = f"; the file as it was is {record.backup}" if record.backup else ""
            names = ", ".join(state.changed_since)
            raise ConfigError(f"{record.file}: changed since it was written: {names}; edit it by hand{was}")
    outcomes = [_restore(record, state) for record, state in zip(records, states, strict=True)]
    journal.save(tool, [])
    return outcomes


@dataclass(frozen=True)
class _State:
    """A file now, and what it would be without quantd: None for no file.

    is_exact: with the bytes from before. changed_since: settings of quantd's changed again, in words.
    """

    disk: bytes | None
    base: bytes | None
    is_exact: bool = False
    changed_since: Sequence[str] = ()

    @classmethod
    def of(cls, record: Written) -> _State:
        disk = read_file(Path(record.file))
        if disk is None:
            return cls(None, None)
        if _digest(disk) == record.sha256:
            backup = None if record.backup is None else read_file(Path(record.backup))
            if backup is not None or record.backup is None:
                return cls(disk, backup, is_exact=True)
        document, newline = _open(Path(record.file), record.format, disk)
        changed_since = revert(document, record.changes)
        base = _encode(document, newline)
        return cls(disk, None if not base and record.backup is None else base, changed_since=changed_since)


@dataclass(frozen=True)
class _Plan:
    """A write to be done. disk: what is there now. base: that without quantd. new: what will be there."""

    disk: bytes | None
    base: bytes | None
    new: bytes
    record: Written
    outcome: Outcome


def _plan(tool: str, file: ConfigFile, earlier: Written | None, replace: bool) -> _Plan:
    disk = read_file(file.path)
    if disk is None and file.instead_of is not None and file.instead_of.exists():
        raise ConfigError(
            f"{file.path} would be read in place of {file.instead_of}; move what is there over first"
        )
    base = disk if earlier is None else _State.of(earlier).base
    document, newline = _open(file.path, file.format, base or b"")
    try:
        changes, kept = merge(document, file.puts, replace)
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None
    new = _encode(document, newline)
    folders = [str(folder) for folder in missing_folders(file.path)] or (earlier.folders if earlier else [])
    # With the tool's name in it, since tools can share a file.
    backup_path = file.path.with_name(f"{file.path.name}.before-quantd-{tool}")
    backup = backup_path if changes and base is not None else None
    backup_name = None if backup is None else str(backup)
    record = Written(str(file.path), file.format, backup_name, _digest(new), changes, folders)
    outcome = Outcome(file.path, "has it already" if new == disk else "written", backup, kept)
    return _Plan(disk, base, new, record, outcome)


def _restore(record: Written, state: _State) -> Outcome:
    path = Path(record.file)
    backup = None if record.backup is None else Path(record.backup)
    if state.disk is None:
        return Outcome(path, "is not there any more", backup)
    if state.base is None:
        remove_file(path, map(Path, record.folders))
        return Outcome(path, "removed; there was none before")
    replace_file(path, state.base)
    if not state.is_exact:
        return Outcome(path, "without quantd's part; what you changed since stays", backup)
    if backup is not None:
        remove_file(backup)
    return Outcome(path, "as it was")


def _open(path: Path, format: str, data: bytes) -> tuple[Document, str]:
    """The document, and the line ending of the file. Raises ConfigError naming the line that is broken."""
    try:
        text = data.decode()
        newline = "\r\n" if text.count("\r\n") == text.count("\n") > 0 else "\n"
        return FORMATS[format](text.replace(newline, "\n")), newline
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: is not UTF-8") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}; mend it first") from None


def _encode(document: Document, newline: str) -> bytes:
    return document.text().replace("\n", newline).encode()


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
