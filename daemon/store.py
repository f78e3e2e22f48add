"""The models on disk: one folder each, complete or not there at all.

A model folder holds config.json, tokenizer.json, the weights (safetensors or one GGUF) and quantd.json,
which is written last. It is built as `.partial-*` beside the models and renamed into place when complete.
Torch-free.
"""

from __future__ import annotations

import contextlib
import difflib
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from quantd.daemon.catalogue import CATALOGUE
from quantd.daemon.derive import Changes
from quantd.daemon.errors import DiskFullError, ModelNotFoundError, StoreError
from quantd.daemon.sources.disk import is_full
from quantd.daemon.sources.local import LocalSource
from quantd.daemon.sources.source import Progress, Source
from quantd.daemon.sources.spec import parse_source
from quantd.kernels.errors import QuantdError
from quantd.quant.config import read_quant_config
from quantd.quant.safetensors_file import TensorIndex, read_index, read_json

MANIFEST = "quantd.json"
PART = r"[A-Za-z0-9](?:[A-Za-z0-9._]|-(?!-)){0,95}"
NAME = re.compile(rf"{PART}(?:/{PART})?(?::{PART})?")
# What users of Ollama may put before a name.
_HOST = re.compile(r"^(?:hf\.co/|huggingface\.co/|(?:registry\.ollama\.ai/)?(?:library/)?)")
# Marks of folders that are of no use once their process is gone, unlike a fetch that can be gone on with.
_BUILDING, _REMOVING = "building", "removing"
_ABANDONED_SECONDS = 7 * 24 * 3600.0
DTYPE_WORDS = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


class Manifest(msgspec.Struct, frozen=True):
    """quantd.json: what the store knows of a model without reading its other files."""

    name: str
    source: str
    description: str
    architecture: str
    bytes: int
    created: float


@dataclass(frozen=True)
class StoredModel:
    """A complete model. path: its folder. source: how to fetch it again. description: "gguf Q4_1".

    architecture: Hugging Face's model_type. bytes: size of the weight files. created: Unix time in seconds.
    """

    name: str
    path: Path
    source: str
    description: str
    architecture: str
    bytes: int
    created: float


def _silent(stage: str, done: int, total: int | None) -> None:
    pass


class Store:
    """The models under `root`, which need not exist yet. Safe with several processes at once."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def list(self) -> list[StoredModel]:
        """All models, by name."""
        entries = sorted(self.root.iterdir()) if self.root.is_dir() else []
        found = [self._read(entry) for entry in entries if not entry.name.startswith(".")]
        return [model for model in found if model is not None]

    def get(self, name: str) -> StoredModel:
        """The model called `name`, as people may call it (see `plain_name`).

        ModelNotFoundError names those that are spelled alike.
        """
        name = plain_name(name)
        model = self._read(self._folder(name)) if NAME.fullmatch(name) else None
        if model is None:
            raise ModelNotFoundError(self._missing(name))
        return model

    def pull(self, spec: str, name: str | None = None, progress: Progress = _silent) -> StoredModel:
        """Fetch a model (see `parse_source`); at once where it is there already.

        Raises ModelNotFoundError for an unknown spec, StoreError where fetching fails or the name is taken,
        CheckpointError or UnsupportedModelError where what came is not a model quantd can load.
        """
        return self.add(parse_source(spec), name, progress)

    def import_path(
        self, path: Path, name: str | None = None, copy: bool = False, progress: Progress = _silent
    ) -> StoredModel:
        """Take in a model folder or .gguf file, linked unless `copy`. Errors as in `pull`."""
        return self.add(LocalSource(path.absolute(), copy), name, progress)

    def add(
        self,
        source: Source,
        name: str | None = None,
        progress: Progress = _silent,
        changes: Changes | None = None,
        replace: bool = False,
    ) -> StoredModel:
        """Fetch from `source` under `name`, with some changes.

        What is there from the same source is left as it is, unless it is to be replaced, whatever it is.
        """
        name = plain_name(source.default_name if name is None else name)
        folder = self._folder(check_name(name))
        with self._locked(name, progress):
            self._sweep()
            present = self._read(folder)
            if present is not None and not replace:
                return _same_source(present, source)
            if present is None and folder.exists():
                raise StoreError(f"{folder} is in the way and not a model of quantd; move it away")
            partial = self._partial(name, source)
            with _told_as(source.spec, partial), _kept_only_if(source.resumable, partial):
                source.fetch(partial, progress)
                progress("preparing", 0, None)
                manifest = complete(partial, name, source.spec)
                if changes is not None:
                    changes.write(partial)
                _write_through(partial, manifest)
                if present is not None:
                    self._delete(present)
                partial.rename(folder)
        return self.get(name)

    def remove(self, name: str) -> None:
        """Delete the model's folder, of a linked model only the links; ModelNotFoundError without one."""
        name = self.get(name).name
        with self._locked(name, _silent):
            self._discard(name)
            self._delete(self.get(name))

    def _delete(self, model: StoredModel) -> None:
        """Renamed first, so that a removal cut short never leaves half a model."""
        doomed = self._partial_path(model.name, _REMOVING)
        model.path.rename(doomed)
        shutil.rmtree(doomed)

    def _folder(self, name: str) -> Path:
        return self.root / name.replace("/", "--").replace(":", "@")

    def _partial(self, name: str, source: Source) -> Path:
        """An empty folder to build in, or what a dead fetch from the same resumable source left."""
        mark = hashlib.sha256(source.spec.encode()).hexdigest()[:8] if source.resumable else _BUILDING
        partial = self._partial_path(name, mark)
        self._discard(name, keep=partial if source.resumable else None)
        partial.mkdir(exist_ok=True)
        return partial

    def _partial_path(self, name: str, mark: str) -> Path:
        return self.root / f".partial-{self._folder(name).name}-{mark}"

    def _discard(self, name: str, keep: Path | None = None) -> None:
        """Clear what dead fetches of `name` left. Marks have eight characters, so no other name matches."""
        for leftover in self.root.glob(self._partial_path(name, "?" * 8).name):
            if leftover != keep:
                shutil.rmtree(leftover)

    def _sweep(self) -> None:
        """Clear what processes left of other names that died, or that nobody went on with for a week."""
        for leftover in self.root.glob(".partial-*"):
            name, _, mark = leftover.name.removeprefix(".partial-").rpartition("-")
            with contextlib.suppress(OSError), (self.root / ".locks" / name).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                age = time.time() - leftover.stat().st_mtime
                if mark in (_BUILDING, _REMOVING) or age > _ABANDONED_SECONDS:
                    shutil.rmtree(leftover)

    def _read(self, folder: Path) -> StoredModel | None:
        try:
            manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
        except (OSError, msgspec.MsgspecError):
            return None
        if self._folder(manifest.name) != folder:
            return None
        return StoredModel(path=folder, **msgspec.structs.asdict(manifest))

    def _missing(self, name: str) -> str:
        folder = self._folder(name)
        if NAME.fullmatch(name) and folder.exists():
            return (
                f"{folder} is here, but has no {MANIFEST} that says {name!r}; quantd doctor tells what to do"
            )
        known = [model.name for model in self.list()]
        near = difflib.get_close_matches(name, known, n=3)
        if near:
            return f"there is no model {name!r}; did you mean {' or '.join(map(repr, near))}?"
        if name in CATALOGUE:
            return f"there is no model {name!r} yet; fetch it with: quantd pull {name}"
        return (
            f"there is no model {name!r}; there are: {', '.join(known) or 'none yet (quantd pull smollm2)'}"
        )

    @contextmanager
    def _locked(self, name: str, progress: Progress) -> Iterator[None]:
        """Hold the name's lock file; the kernel drops the lock of a process that dies."""
        locks = self.root / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / self._folder(name).name).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                progress("waiting", 0, None)
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def plain_name(name: str) -> str:
    """`name` as the store has it: without the host before it and the tag `latest` behind it."""
    return _HOST.sub("", name).removesuffix(":latest")


def model_name(folder: Path) -> str:
    """The name of the model that lies in a folder of the store."""
    return folder.name.replace("--", "/").replace("@", ":")


def full_name(name: str) -> str:
    """A name of the store as Ollama lists it, with its tag."""
    return name if ":" in name else f"{name}:latest"


def check_name(name: str) -> str:
    """`name` itself if it can name a model.

    That is letters, digits, `.`, `_`, single `-`, at most one `/`, and a tag behind a `:`.
    """
    if not NAME.fullmatch(name):
        raise StoreError(
            f"{name!r} cannot name a model: use letters, digits, '.', '_' and single '-', beginning with a "
            "letter or digit, with at most one '/', and a tag behind ':'"
        )
    return name


def _same_source(present: StoredModel, source: Source) -> StoredModel:
    if present.source != source.spec:
        raise StoreError(
            f"there is a model {present.name!r} already, from {present.source}; choose another name (--name) "
            f"or remove it first (quantd rm {present.name})"
        )
    return present


@contextmanager
def _told_as(spec: str, folder: Path) -> Iterator[None]:
    """Errors name the source that the user gave in place of the folder it is built in."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise DiskFullError(
                f"{spec}: the disk is full ({error.strerror}); make room, then try again"
            ) from error
        raise StoreError(f"{spec}: {error.strerror or error}") from error
    except QuantdError as error:
        message = str(error).replace(str(folder), spec).replace(f"{spec}/{Path(spec).name}", spec)
        raise type(error)(message if spec in message else f"{spec}: {message}") from error


@contextmanager
def _kept_only_if(resumable: bool, folder: Path) -> Iterator[None]:
    """Remove `folder` when the body fails, unless a later fetch can go on in it."""
    try:
        yield
    except BaseException:
        if not resumable:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def complete(folder: Path, name: str, source: str) -> Manifest:
    """Check that `folder` holds a whole model, convert a GGUF's header, and describe it."""
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) > 1:
        raise StoreError(f"{source}: {len(ggufs)} GGUF files, expected one; import the file itself")
    if ggufs:
        # Lazy: the converter imports tokenizers and gguf, which other commands need not wait for.
        from quantd.quant.gguf_import import import_gguf
        from quantd.quant.gguf_index import INDEX_NAME, read_gguf_index

        if not (folder / INDEX_NAME).is_file():
            import_gguf(ggufs[0], folder)
        description, weights = read_gguf_index(folder).description, ggufs
    else:
        index = read_index(folder)
        description, weights = _describe(folder, index), list({info.file for info in index.values()})
    config = read_json(folder / "config.json")
    if not (folder / "tokenizer.json").is_file():
        raise StoreError(
            f"{source}: tokenizer.json is missing; save the tokenizer in its fast form beside it"
        )
    num_bytes = sum(path.stat().st_size for path in weights)
    return Manifest(name, source, description, str(config.get("model_type")), num_bytes, time.time())


def _describe(folder: Path, index: TensorIndex) -> str:
    quantization = read_quant_config(folder, read_json(folder / "config.json"))
    if quantization is not None:
        return quantization.description
    sizes: dict[str, int] = {}
    for info in index.values():
        sizes[info.dtype] = sizes.get(info.dtype, 0) + info.nbytes
    largest = max(sizes, key=lambda dtype: sizes[dtype], default="no")
    return f"{DTYPE_WORDS.get(largest, largest.lower())} weights"


def _write_through(folder: Path, manifest: Manifest) -> None:
    """Write the manifest last, with all bytes on the disk before the folder is called a model."""
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                os.fsync(file.fileno())
