"""A repository of the Hugging Face hub, or a file of one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantd.daemon.checksums import Checksum
from quantd.daemon.errors import StoreError
from quantd.daemon.sources.disk import check_room, folder_bytes, is_full, watched
from quantd.daemon.sources.files import POOLING_FILE, is_model_file, is_pickle
from quantd.daemon.sources.source import Progress

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import RepoSibling


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
            check_room(folder, total - folder_bytes(folder))
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
