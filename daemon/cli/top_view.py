"""How `quantd top` looks: the daemon's status as a screen of a given size. No terminal, no daemon."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from quantd.daemon.cli.output import format_bytes, format_time_left

Status: TypeAlias = Mapping[str, Any]
"""What /quantd/status answers."""

# Rows of a model and its map, and of the lines around the tables.
_ROWS_A_MODEL = 4
_ROWS_AROUND = 6
_MOST_REASONS = 3
_PHASES = ("decode", "prefill", "sending", "preparing", "grammar", "waiting", "loading")
_STYLES = {
    "decode": "green",
    "prefill": "cyan",
    "waiting": "yellow",
    "loading": "yellow",
    "grammar": "yellow",
}
# Of a cell of the map: nothing, cached only, and then the more is held.
_EMPTY, _CACHED, _HELD = "·", "░", "▒▓█"
_ASCII = str.maketrans(_EMPTY + _CACHED + _HELD, ".-+##")


@dataclass(frozen=True)
class Rates:
    """Of a model between two looks, in tokens a second. None: not known."""

    decode: float | None = None
    prefill: float | None = None


def rates_between(before: Status | None, now: Status, seconds: float) -> dict[str, Rates]:
    """Of each model that the same engine has had in both looks."""
    if before is None or seconds <= 0:
        return {}
    counted = {model["name"]: model["stats"] for model in before["models"] if model["stats"]}
    return {
        model["name"]: _rates(counted[model["name"]], model["stats"], seconds)
        for model in now["models"]
        if model["stats"] and model["name"] in counted
    }


def _rates(before: Mapping[str, int], now: Mapping[str, int], seconds: float) -> Rates:
    generated = now["generated_tokens"] - before["generated_tokens"]
    computed = now["computed_tokens"] - before["computed_tokens"]
    if generated < 0 or computed < 0:  # of another engine
        return Rates()
    # All computed tokens are of prompts, but for those that were drawn before.
    return Rates(generated / seconds, max(computed - generated, 0) / seconds)


def screen(status: Status, rates: Mapping[str, Rates], width: int, height: int | None) -> RenderableType:
    """All of it. height None: as long as it takes."""
    models, requests = status["models"], status["requests"]
    parts: list[RenderableType] = [_head(status, width)]
    if not models:
        parts.append(Text("No model is in memory; the first request for one loads it.", style="dim"))
    for model in models:
        parts.append(_model(model, rates.get(model["name"]), requests, width))
    room = None if height is None else max(height - _ROWS_AROUND - _ROWS_A_MODEL * len(models), 1)
    parts += ["", *_requests(requests, width, room)]
    return Group(*parts)


def no_daemon(reason: str) -> RenderableType:
    """While none answers."""
    return Group(Text(reason, style="yellow"), Text("Looking again; q quits.", style="dim"))


def as_ascii(text: str) -> str:
    """For terminals that know nothing else."""
    return text.translate(_ASCII).replace("…", "~").encode("ascii", "replace").decode()


def _head(status: Status, width: int) -> RenderableType:
    first = Text(f"quantd {status['version']}", style="bold")
    first.append(f"  process {status['pid']}, up {format_time_left(status['uptime_seconds'])}", style="none")
    memory = status["memory"]
    engines = sum(model["memory_bytes"] or 0 for model in status["models"])
    used = f"memory: daemon {_size(memory['daemon_bytes'])}, engines {_size(engines)}"
    free = f"{_size(memory['available_bytes'])} of {_size(memory['total_bytes'])} free"
    lines = [first, Text(f"{used}; {free}"), Text(", ".join(status["listening"]), style="dim")]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return Group(*lines)


def _model(
    model: Mapping[str, Any], rates: Rates | None, requests: Sequence[Mapping[str, Any]], width: int
) -> RenderableType:
    title = Text(model["name"], style="bold")
    info, stats, pool = model["info"], model["stats"], model["pool"]
    if info is None:
        done, total = model["progress"]["done"], model["progress"]["total"]
        title.append(f"  {model['state']}  {100 * done // total if total else 0} %", style="yellow")
        title.truncate(width, overflow="ellipsis")
        return Group("", title)
    title.append(
        f"  {model['state']}, {info['backend']}, {_size(info['weight_bytes'])} of weights", style="none"
    )
    if model["unloads_in"]:
        title.append(f", unloads in {format_time_left(model['unloads_in'])}", style="none")
    if stats is None or pool is None:
        return Group("", title, Text("in a long step", style="dim"))
    line = Text(_model_line(stats, rates or _told_rates(model["name"], requests)))
    for text in (title, line):
        text.truncate(width, overflow="ellipsis")
    kv = Text(_kv(stats, info["block_size"]))
    kv.append_text(pool_map(pool, stats["blocks_total"], max(width - len(kv), 8)))
    return Group("", title, line, kv)


def _told_rates(name: str, requests: Sequence[Mapping[str, Any]]) -> Rates:
    """From one look: what the answers under way have had so far."""
    told = [request["tokens_per_second"] for request in requests if request["model"] == name]
    return Rates(decode=sum(rate for rate in told if rate is not None))


def _model_line(stats: Mapping[str, int], rates: Rates) -> str:
    queries = stats["prefix_queries"]
    hits = f"{100 * stats['prefix_hits'] / queries:.0f} %" if queries else "-"
    return (
        f"{stats['num_running']} running, {stats['num_waiting']} waiting"
        f"  {_rate(rates.decode)} tok/s, prompts {_rate(rates.prefill)} tok/s  prefix hits {hits}"
    )


def _kv(stats: Mapping[str, int], block_size: int) -> str:
    """Tokens that requests hold, those that only the prefix cache does, and what fits."""
    held = stats["blocks_total"] - stats["blocks_free"] - stats["blocks_cached"]
    sizes = (_count(number * block_size) for number in (held, stats["blocks_cached"], stats["blocks_total"]))
    return "KV {}+{} of {} ".format(*sizes)


def pool_map(pool: Mapping[str, Any], num_blocks: int, width: int) -> Text:
    """One row: what is held and what only the prefix cache has, from the pool's first block to its last."""
    held, cached, size = pool["held"], pool["cached"], pool["blocks_per_cell"]
    line = Text()
    for column in range(min(width, len(held))):
        cells = slice(column * len(held) // width, max((column + 1) * len(held) // width, 1))
        if len(held) <= width:
            cells = slice(column, column + 1)
        blocks = max(min(cells.stop * size, num_blocks) - cells.start * size, 1)
        part = sum(held[cells]) / blocks
        if part:
            line.append(_HELD[min(int(part * len(_HELD)), len(_HELD) - 1)], style="green")
        elif any(cached[cells]):
            line.append(_CACHED, style="blue")
        else:
            line.append(_EMPTY, style="dim")
    return line


def _requests(
    requests: Sequence[Mapping[str, Any]], width: int, room: int | None
) -> Sequence[RenderableType]:
    if not requests:
        return [Text("No request is under way.", style="dim")]
    ordered = sorted(requests, key=lambda request: (_PHASES.index(request["phase"]), -request["seconds"]))
    reasons = list(_reasons(ordered, width))
    shown = ordered if room is None else ordered[: max(room - len(reasons), 1)]
    table = Table(box=None, pad_edge=False, width=width, header_style="bold")
    table.add_column("CLIENT", ratio=3, no_wrap=True, overflow="ellipsis")
    table.add_column("REQUEST", ratio=4, no_wrap=True, overflow="ellipsis")
    table.add_column("MODEL", ratio=3, no_wrap=True, overflow="ellipsis")
    table.add_column("DOES", ratio=3, no_wrap=True, overflow="ellipsis")
    for name in ("IN", "CACHED", "OUT", "TOK/S", "TIME"):
        table.add_column(name, justify="right", no_wrap=True)
    for request in shown:
        table.add_row(*_row(request))
    rest = len(ordered) - len(shown)
    return [table, *([Text(f"and {rest} more", style="dim")] if rest else []), *reasons]


def _reasons(requests: Sequence[Mapping[str, Any]], width: int) -> Iterator[Text]:
    """Why those at the head of the queue wait."""
    waiting = [request for request in requests if request["why"]]
    for request in waiting[:_MOST_REASONS]:
        line = Text(f"{request['client']['name']}: {request['why']}", style="yellow")
        line.truncate(width, overflow="ellipsis")
        yield line


def _row(request: Mapping[str, Any]) -> tuple[RenderableType, ...]:
    computed, prompt = request["computed_tokens"], request["prompt_tokens"]
    tokens = _count(prompt) if computed >= prompt else f"{_count(computed)}/{_count(prompt)}"
    return (
        Text(request["client"]["name"]),
        Text(_short(request["route"])),
        Text(request["model"] or "-"),
        Text(request["phase"], style=_STYLES.get(request["phase"], "none")),
        tokens,
        _count(request["cached_tokens"]),
        _count(request["output_tokens"]),
        _rate(request["tokens_per_second"]),
        format_time_left(request["seconds"]),
    )


def _short(route: str) -> str:
    """What tells routes apart: their ends."""
    return route.removeprefix("POST ").removeprefix("/v1").removeprefix("/api").lstrip("/")


def _count(number: int) -> str:
    """Such as 950, 1.2k and 524k."""
    if number < 1000:
        return str(number)
    for unit in ("k", "M"):
        number_in = number / (1000 if unit == "k" else 1e6)
        if number_in < 999.5:
            return f"{number_in:.1f}{unit}" if number_in < 9.95 else f"{number_in:.0f}{unit}"
    return f"{number / 1e9:.1f}G"


def _rate(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1f}" if rate < 99.95 else f"{rate:.0f}"


def _size(num_bytes: int | None) -> str:
    return "?" if num_bytes is None else format_bytes(num_bytes)
