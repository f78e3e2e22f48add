"""Which weights a model folder holds: digests of its files, kept while these are unchanged (torch-free).

To read a model through takes seconds, so a file's digest (SHA-256) is kept under what no write to it leaves
as it was: device, inode, size, times of change.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path

_WEIGHTS = ("*.safetensors", "*.gguf")
# What the weights mean; of a GGUF that stands in the file itself.
_MEANING = ("config.json", "quantize_config.json", "quant_config.json")


class WeightDigests:
    """The digests remembered in `folder`, which need not exist yet."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def identity(self, model: Path) -> list[str]:
        """What is another one once the weights of a model folder have changed. Raises OSError."""
        return [_identity(path) for path in _weight_files(model)]

    def known(self, model: Path) -> bytes | None:
        """The digest of a model folder, if no weights must be read for it. Raises OSError."""
        found = [self._remembered(path) for path in _weight_files(model)]
        return None if None in found else _combine(model, [digest for digest in found if digest])

    def compute(self, model: Path) -> bytes:
        """The digest of a model folder, of which new files are read. Raises OSError."""
        return _combine(model, [self._remembered(path) or self._read(path) for path in _weight_files(model)])

    def _read(self, path: Path) -> str:
        identity = _identity(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if _identity(path) == identity:
            self._remember(identity, digest)
        return digest

    def _remembered(self, path: Path) -> str | None:
        try:
            digest = (self._folder / _identity(path)).read_text()
        except OSError:
            return None
        return digest if len(digest) == 2 * hashlib.sha256().digest_size else None

    def _remember(self, identity: str, digest: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False) as file:
            file.write(digest)
        Path(file.name).replace(self._folder / identity)


def _weight_files(model: Path) -> list[Path]:
    return sorted(path for pattern in _WEIGHTS for path in model.glob(pattern))


def _identity(path: Path) -> str:
    found = path.stat()
    return f"{found.st_dev}-{found.st_ino}-{found.st_size}-{found.st_mtime_ns}-{found.st_ctime_ns}"


def _combine(model: Path, digests: list[str]) -> bytes:
    """Names of files do not count, so that a copy under another name is the same model."""
    total = hashlib.sha256("".join(sorted(digests)).encode())
    for name in _MEANING:
        path = model / name
        total.update(hashlib.sha256(path.read_bytes() if path.is_file() else b"").digest())
    return total.digest()
