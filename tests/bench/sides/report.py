"""Rows of a comparison: medians of interleaved runs, a goal, and whether it is met."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console
from rich.table import Table

_PIPE_COLUMNS = 190


@dataclass(frozen=True)
class Row:
    """One measure. goal: of the ratio to the peer where there is a peer, else of the figure itself.

    peer: a figure of the peer that the goal is about; peer_name says whose, and where it is from.
    note: what else was seen.
    """

    measure: str
    unit: str
    figure: float
    goal: float | None
    peer: float | None = None
    peer_name: str = ""
    better: Literal["more", "less"] = "more"
    note: str = ""

    @property
    def ratio(self) -> float | None:
        return None if self.peer is None else self.figure / self.peer

    @property
    def met(self) -> bool | None:
        """None where nothing was asked."""
        if self.goal is None:
            return None
        value = self.figure if self.ratio is None else self.ratio
        return value >= self.goal if self.better == "more" else value <= self.goal

    @property
    def goal_text(self) -> str:
        if self.goal is None:
            return "-"
        sign = "≥" if self.better == "more" else "≤"
        return f"{sign} {self.goal:g} {self.unit if self.peer is None else 'x'}"


def interleave(repeats: int, runs: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """The median of each after `repeats` rounds of all of them, so that a slow minute is everybody's."""
    seen: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seen[name].append(run())
    return {name: statistics.median(values) for name, values in seen.items()}


def print_rows(title: str, rows: Sequence[Row]) -> None:
    """Print on stdout, at the terminal's width or, into a pipe, wide enough for all columns."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for heading in ("measure", "quantd", "peer", "ratio", "goal", "met", "whose figure; what else was seen"):
        table.add_column(heading, justify="right" if heading in ("quantd", "peer", "ratio") else "left")
    for row in rows:
        table.add_row(
            row.measure,
            f"{row.figure:.4g} {row.unit}",
            "-" if row.peer is None else f"{row.peer:.4g}",
            "-" if row.ratio is None else f"{row.ratio:.2f}",
            row.goal_text,
            {True: "yes", False: "NO", None: "-"}[row.met],
            "; ".join(text for text in (row.peer_name, row.note) if text),
        )
    Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS).print(table)
