"""What all sources of models are to the store.

A source puts files into a folder and says nothing of whether they make a model; that is the store's part.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

Progress = Callable[[str, int, int | None], None]
"""(stage, bytes done, bytes in all or None); may be called from another thread."""


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
