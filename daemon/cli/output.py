"""How commands print: JSON, plain columns, sizes, and progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click

Progress = Callable[[str, int, "int | None"], None]


def print_json(value: object) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Aligned columns, plain enough for awk."""
    table = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(cell) for cell in column) for column in zip(*table, strict=True)]
    for row in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def format_bytes(num_bytes: int) -> str:
    """A size for people, in powers of 1000."""
    from rich.filesize import decimal  # keeps rich out of commands that print no sizes

    return decimal(num_bytes)


def format_time(seconds: float) -> str:
    """A moment since the epoch, to the minute, in local time."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def format_time_left(seconds: float | None) -> str:
    """A time to go in its largest unit, "never" for None."""
    if seconds is None:
        return "never"
    for size, unit in ((3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{round(seconds / size)} {unit}"
    return f"{round(seconds)} s"


@contextmanager
def progress() -> Iterator[Progress]:
    """What long work calls with (stage, bytes done, total or None): bars on a terminal, else plain lines."""
    if not sys.stderr.isatty():
        yield _plain_progress()
        return
    from rich.console import Console  # 0.1 s that only a terminal needs
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, int] = {}

        def report(stage: str, done: int, total: int | None) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, total=total)  # type: ignore[arg-type]

        yield report


@contextmanager
def spinner(text: str) -> Iterator[None]:
    """A sign of life on a terminal while something short is waited for."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console  # 0.1 s that only a terminal needs

    with Console(stderr=True).status(text):
        yield


def _plain_progress() -> Progress:
    """A line for each stage and each further quarter of it. Totals can be estimates, so 100 % is the most."""
    said: dict[str, int] = {}

    def report(stage: str, done: int, total: int | None) -> None:
        quarter = min(4, 4 * done // total) if total else 0
        if said.get(stage, -1) >= quarter:
            return
        said[stage] = quarter
        click.echo(f"{stage}: {25 * quarter} %" if total else f"{stage} ...", err=True)

    return report
