"""Models made of what is on this machine already: another model, or files that a client has sent."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from quantd.daemon.preset import Preset
from quantd.daemon.sources.files import is_model_file, model_files
from quantd.daemon.sources.source import Progress

TEMPLATE_NAME = "chat_template.jinja"
_MODEL = "model:"


@dataclass(frozen=True)
class ModelSource:
    """Another model of the store, whose files are linked: they take no more room, and outlive it."""

    default_name: str
    folder: Path
    resumable: bool = False

    @property
    def spec(self) -> str:
        return _MODEL + self.default_name

    def fetch(self, folder: Path, progress: Progress) -> None:
        for name in model_files(self.folder):
            if name != "quantd.json":
                (folder / name).parent.mkdir(exist_ok=True)
                os.link(self.folder / name, folder / name, follow_symlinks=False)


def parent_of(source: str) -> str:
    """The model that a stored model's source names, "" for none."""
    return source.removeprefix(_MODEL) if source.startswith(_MODEL) else ""


@dataclass(frozen=True)
class FileSource:
    """Files by the names that they are to have, linked from where they lie in the same file system."""

    files: Mapping[str, Path]
    default_name: str = "model"
    resumable: bool = False

    @property
    def spec(self) -> str:
        return "files:" + ",".join(sorted(self.files))

    def fetch(self, folder: Path, progress: Progress) -> None:
        for name, path in self.files.items():
            if Path(name).name == name and is_model_file(name):
                os.link(path, folder / name)


@dataclass(frozen=True)
class Changes:
    """What sets a model apart from what it was made from. template: Jinja, None for the one there is."""

    preset: Preset = field(default_factory=Preset)
    template: str | None = None

    def write(self, folder: Path) -> None:
        """Change a folder whose files may be another model's too."""
        self.preset.over(Preset.read(folder)).write(folder)
        if self.template is not None:
            (folder / TEMPLATE_NAME).unlink(missing_ok=True)
            (folder / TEMPLATE_NAME).write_text(self.template, "utf-8")
