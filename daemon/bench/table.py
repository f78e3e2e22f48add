"""Results as a table for people."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from quantd.daemon.bench.results import Percentiles, Result

_PIPE_COLUMNS = 140
_CAPTION = (
    "first token and between tokens: p50 / p90 / p99 in ms; KV use: slots with live tokens of those allocated"
)


def _milliseconds(found: Percentiles | None) -> str:
    if found is None:
        return "-"
    values = (1000 * value for value in (found.p50, found.p90, found.p99))
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values)


def _lengths(result: Result) -> str:
    load = result.load
    shared = f"{load.shared_len}+" if load.shared_len else ""
    return f"{shared}{load.prompt_len} > {load.output_len}"


_COLUMNS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("load", lambda result: result.load.kind),
    ("clients", lambda result: str(result.load.num_clients)),
    ("in > out", _lengths),
    ("prompt/s", lambda result: f"{result.prompt_rate:.0f}"),
    ("output/s", lambda result: f"{result.output_rate:.1f}"),
    ("decode/s", lambda r: "-" if r.decode_rate is None else f"{r.decode_rate:.1f}"),
    ("first token", lambda result: _milliseconds(result.first_token)),
    ("between tokens", lambda result: _milliseconds(result.inter_token)),
    ("cached", lambda result: str(result.cached_tokens)),
    ("KV use", lambda r: "-" if r.kv_utilisation is None else f"{r.kv_utilisation:.1%}"),
)


def print_results(title: str, results: Sequence[Result]) -> None:
    """Print on stdout, at the terminal's width or, into a pipe, wide enough for all columns."""
    table = Table(
        title=title, caption=_CAPTION, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD
    )
    for heading, _ in _COLUMNS:
        table.add_column(heading, justify="left" if heading == "load" else "right", no_wrap=True)
    for result in results:
        table.add_row(*(cell(result) for _, cell in _COLUMNS))
    Console(width=None if sys.stdout.isatty() else _PIPE_COLUMNS).print(table)
