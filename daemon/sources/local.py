"""A folder or a file of this machine."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from quantd.daemon.errors import StoreError
from quantd.daemon.sources.disk import check_room
from quantd.daemon.sources.files import is_pickle, model_files
from quantd.daemon.sources.source import Progress


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
