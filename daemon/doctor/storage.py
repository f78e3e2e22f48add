"""The folders on disk: whether they can be written, how much fits, and whether the models are whole."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from quantd.daemon.cli.output import format_bytes
from quantd.daemon.config import Paths, load_config
from quantd.daemon.doctor.finding import Finding
from quantd.daemon.errors import ConfigError
from quantd.daemon.store import MANIFEST, Store, StoredModel, complete
from quantd.kernels.errors import QuantdError

_LITTLE_ROOM = 2 * 2**30
_PIECE = 1 << 22


def look_at_folders(paths: Paths) -> Iterator[Finding]:
    """Models, cache and state, and the configuration file."""
    yield _folder("models", paths.models)
    yield _folder("cache", paths.cache)
    yield _folder("state", paths.state)
    yield _config(paths.config)


def _folder(name: str, path: Path) -> Finding:
    there = next(folder for folder in (path, *path.parents) if _exists(folder))
    free = shutil.disk_usage(there).free
    value = f"{path}{'' if there == path else ' (not there yet)'}, {format_bytes(free)} free"
    if not os.access(there, os.W_OK | os.X_OK):
        read_only = os.statvfs(there).f_flag & os.ST_RDONLY
        return Finding(
            "paths",
            name,
            value,
            fault=f"{there} cannot be written",
            fix="set QUANTD_HOME to a folder on a file system that is not read-only"
            if read_only
            else f"sudo chown -R $USER {shlex.quote(str(there))}",
        )
    if free < _LITTLE_ROOM:
        return Finding(
            "paths",
            name,
            value,
            note="little room is left on this disk",
            fix="quantd list shows the models, quantd rm NAME removes one",
        )
    return Finding("paths", name, value)


def _exists(path: Path) -> bool:
    """Whether it is there as far as we can see."""
    try:
        return path.exists()
    except PermissionError:
        return False


def _config(path: Path) -> Finding:
    value = f"{path}{'' if _exists(path) else ' (not there)'}"
    try:
        load_config({})
    except (ConfigError, OSError) as error:
        return Finding("paths", "config", value, fault=str(error), fix=f"edit {shlex.quote(str(path))}")
    return Finding("paths", "config", value)


def look_at_models(root: Path, thoroughly: bool) -> Iterator[Finding]:
    """What is in the store. thoroughly: read all of it."""
    store = Store(root)
    models = store.list()
    size = format_bytes(sum(model.bytes for model in models))
    yield Finding("models", "stored", f"{len(models)}, {size}" if models else "none (quantd pull smollm2)")
    yield from _strays(root, {model.path for model in models})
    if thoroughly:
        for model in models:
            yield _checked(model)


def _strays(root: Path, known: set[Path]) -> Iterator[Finding]:
    """Folders that are no models: downloads that were broken off, and what others put here."""
    for entry in sorted(root.iterdir()) if root.is_dir() else []:
        if entry.name.startswith(".partial-"):
            size = sum(path.lstat().st_size for path in entry.rglob("*"))
            yield Finding(
                "models",
                entry.name,
                f"{format_bytes(size)} of a download that was broken off",
                note="a pull of the same model goes on with it",
                fix=f"rm -r {shlex.quote(str(entry))}",
            )
        elif not entry.name.startswith(".") and entry not in known:
            yield Finding(
                "models",
                entry.name,
                "no model",
                note=f"{entry} has no {MANIFEST} that can be read and names it",
                fix=f"quantd import {shlex.quote(str(entry))} --copy, or move it away",
            )


def _checked(model: StoredModel) -> Finding:
    try:
        found = complete(model.path, model.name, model.source)
        if found.bytes != model.bytes:
            raise OSError(0, f"its weights have {found.bytes} bytes, and had {model.bytes} when it came")
        _read_all(model.path)
    except (QuantdError, OSError) as error:
        reason = str(error) if isinstance(error, QuantdError) else error.strerror or str(error)
        return Finding(
            "models",
            model.name,
            f"{model.description}, damaged",
            fault=reason,
            fix=_fetch_again(model),
        )
    return Finding("models", model.name, f"{model.description}, {format_bytes(model.bytes)}, whole")


def _read_all(folder: Path) -> None:
    """A disk that fails says so when it is read. Raises OSError."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(_PIECE):
                    pass


def _fetch_again(model: StoredModel) -> str:
    name = shlex.quote(model.name)
    if model.source.startswith("file:"):
        source = shlex.quote(model.source.removeprefix("file:"))
        return f"quantd rm {name} && quantd import {source} --name {name}"
    return f"quantd rm {name} && quantd pull {shlex.quote(model.source)}"
