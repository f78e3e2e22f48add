"""Results as a picture, an SVG or PNG file. matplotlib is optional (the extra `bench`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantd.daemon.errors import ConfigError

if TYPE_CHECKING:
    from quantd.daemon.bench.results import Percentiles, Result

_SUFFIXES = (".svg", ".png")


def check_plot(file: Path) -> None:
    """Raise ConfigError, before anything is measured, for a file that could not be written."""
    if file.suffix.lower() not in _SUFFIXES:
        raise ConfigError(f"--plot: {file} must end in {' or '.join(_SUFFIXES)}")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {file.absolute().parent}")
    try:
        import matplotlib  # noqa: F401 - optional
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib") from None


def save_plot(results: Sequence[Result], title: str, file: Path) -> None:
    """Write the figure: rates, times to the first token and times between tokens, over the clients."""
    from matplotlib.figure import Figure  # optional, and 0.3 s

    scaling = [result for result in results if result.load.kind in ("decode", "concurrency")]
    shared = [result for result in results if result.load.shared_len]
    figure = Figure(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    (rates, first), (gaps, prefix) = figure.subplots(2, 2)
    _plot_rates(rates, scaling)
    _plot_percentiles(first, scaling, "time to first token", lambda result: result.first_token)
    _plot_percentiles(gaps, scaling, "time between tokens", lambda result: result.inter_token)
    _plot_shared(prefix, shared)
    figure.savefig(file)


def _plot_rates(axes: Any, results: Sequence[Result]) -> None:
    axes.plot(_clients(results), [result.output_rate for result in results], marker="o")
    _label(axes, "output, all clients", "tokens / s")


def _plot_percentiles(
    axes: Any, results: Sequence[Result], title: str, pick: Callable[[Result], Percentiles | None]
) -> None:
    known = [(result, found) for result in results if (found := pick(result)) is not None]
    for name in ("p50", "p90", "p99"):
        values = [1000 * getattr(found, name) for _, found in known]
        axes.plot(_clients([result for result, _ in known]), values, marker="o", label=name)
    axes.legend()
    _label(axes, title, "ms")


def _plot_shared(axes: Any, results: Sequence[Result]) -> None:
    names = [f"{result.load.kind}\n{result.output_rate:.0f} tok/s" for result in results]
    axes.bar(names, [1000 * result.first_token.p50 for result in results])
    axes.set(title="time to first token behind a shared prefix, p50", ylabel="ms")


def _clients(results: Sequence[Result]) -> list[int]:
    return [result.load.num_clients for result in results]


def _label(axes: Any, title: str, unit: str) -> None:
    axes.set(title=title, xlabel="clients", ylabel=unit)
    axes.set_ylim(bottom=0)
    axes.grid(visible=True, alpha=0.3)
