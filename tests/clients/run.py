"""Real clients against a daemon with the small model: `make clients`, `python tests/clients/run.py NAME ...`.

Installs Claude Code, Codex, opencode, Continue (its command line, and the library that fills gaps for its
editors), Cline, Aider, llm and litellm below build/clients, gives each the settings that `quantd connect`
writes, with a key, which the daemon asks for, and prints whether it connected, streamed, called a tool when
it was forced to, and ended the daemon's work when it was stopped. What a forced call asks for is the small
model's guess; that the client runs it and comes back is the point. Clients have no network but loopback,
where that can be had.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agents import AGENTS, Agent, Place
from checks import Bench, Outcome, ask, cancel, force
from install import VERSIONS, install
from isolation import bring_up_loopback, can_isolate, run_isolated
from recorder import recording
from rich import box
from rich.console import Console
from rich.table import Table

from quantd.daemon.cli.client import DaemonClient
from quantd.daemon.preset import Preset
from quantd.daemon.store import Store, StoredModel

REPO = Path(__file__).parents[2]
INSTALLED = REPO / "build" / "clients"
QUANTD = (sys.executable, "-P", "-m", "quantd.daemon.cli.main")
MODEL = "smollm2"
# Small models repeat themselves when they take the likeliest token at each place.
CALM = Preset(sampling={"temperature": 0.0, "repetition_penalty": 1.1})
# The same model, which does not stop before it is stopped.
TALKER = "talker"
TALKING = Preset(sampling={"min_tokens": 4000})
INFILL = {
    "<gh_stars>": "<fim_prefix>",
    "<issue_start>": "<fim_middle>",
    "<issue_comment>": "<fim_suffix>",
}
_START_SECONDS = 120.0
_COLUMNS = 150


@dataclass(frozen=True)
class Result:
    """One row of the table."""

    agent: Agent
    connected: Outcome
    streamed: Outcome
    tool: Outcome
    cancelled: Outcome

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return self.connected, self.streamed, self.tool, self.cancelled


def kept_home() -> Path:
    """The home that the tests keep."""
    return Path(os.environ.get("QUANTD_TEST_HOME", REPO / "build" / "test-home")).absolute()


def kept_model() -> StoredModel:
    """The small model in it, fetched by the first run that needs it."""
    return Store(kept_home() / "models").pull(MODEL)


def prepare_models(home: Path) -> None:
    """A home of quantd with the two models, made of the one that the tests keep."""
    kept, source = kept_home(), home / "source"
    shutil.copytree(kept_model().path, source)
    spell_infill(source / "tokenizer.json")
    store = Store(home / "models")
    for name, preset in ((MODEL, CALM), (TALKER, TALKING)):
        preset.write(store.import_path(source, name).path)
    kernels = kept / "cache" / "quantd" / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    (home / "cache").mkdir()
    (home / "cache" / "kernels").symlink_to(kernels)


def spell_infill(tokenizer: Path) -> None:
    """Rename three tokens that no chat has to StarCoder's marks of a gap; what fills it makes no sense."""
    text = tokenizer.read_text()
    for name, mark in INFILL.items():
        text = text.replace(json.dumps(name), json.dumps(mark))
    tokenizer.write_text(text)


@contextlib.contextmanager
def daemon(home: Path) -> Iterator[str]:
    """A daemon of its own with both models loaded; its URL."""
    log = home / "daemon.log"
    options = [
        "--socket",
        str(home / "api.sock"),
        "--port",
        "0",
        "--kv-memory",
        "512MiB",
        "--keep-alive",
        "-1",
        "--require-key",
        "always",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen([*QUANTD, "serve", *options], stderr=output, env=_environment(home))
    try:
        url = _wait_for_url(process, log)
        client = DaemonClient(home / "api.sock")
        for model in (MODEL, TALKER):
            for _ in client.lines("/quantd/load", {"model": model}):
                pass
        yield url
    finally:
        process.terminate()
        process.wait()


def _wait_for_url(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        for line in log.read_text().splitlines():
            if line.startswith("READY"):
                return next(word for word in line.split() if word.startswith("http://"))
        time.sleep(0.1)
    raise SystemExit(f"the daemon does not start:\n{log.read_text()}")


def _environment(home: Path) -> dict[str, str]:
    return os.environ | {"QUANTD_HOME": str(home)}


def status_of(home: Path) -> Callable[[], Mapping[str, int]]:
    """The counters of all models of the daemon, summed."""
    client = DaemonClient(home / "api.sock")

    def status() -> Mapping[str, int]:
        stats = [model["stats"] for model in client.get("/quantd/status")["models"]]
        return {"num_running": sum(one["num_running"] + one["num_waiting"] for one in stats)}

    return status


def make_key(home: Path) -> str:
    """An API key of the daemon's that has this home."""
    command = [*QUANTD, "key", "add", "clients"]
    done = subprocess.run(command, env=_environment(home), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def place_maker(work: Path, home: Path, port: int) -> Callable[[Agent, str], Place]:
    """Makes places below `work`, whose clients are told of a port."""
    numbers, key, root = itertools.count(), make_key(home), f"http://127.0.0.1:{port}"

    def make(agent: Agent, model: str) -> Place:
        folder = work / f"{agent.name}-{next(numbers)}"
        place = Place(folder / "home", folder / "project", INSTALLED, root, key, model)
        place.home.mkdir(parents=True)
        place.project.mkdir()
        (place.project / "notes.txt").write_text("The heron stands in the shallow water.\n")
        if agent.connects_as is not None:
            _connect(agent.connects_as, place, home)
        return place

    return make


def _connect(name: str, place: Place, home: Path) -> None:
    host = place.root.removeprefix("http://")
    command = [*QUANTD, "connect", name, "--write", "--model", place.model, "--host", host]
    environment = _environment(home) | {"HOME": str(place.home), "QUANTD_KEY": place.key}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"quantd connect {name} failed:\n{done.stdout}{done.stderr}")


async def try_all(agents: Sequence[Agent], work: Path, home: Path, url: str) -> list[Result]:
    """Every client, one after another."""
    quiet = {"DO_NOT_TRACK": "1", "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1", "TERM": "dumb"}
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    results = []
    async with recording(url) as (recorder, port):
        bench = Bench(recorder, status_of(home), kept | quiet, place_maker(work, home, port))
        for agent in agents:
            print(f"{agent.name} ...", file=sys.stderr, flush=True)
            connected, streamed = await ask(bench, agent, MODEL)
            tool = await force(bench, agent, MODEL)
            results.append(Result(agent, connected, streamed, tool, await cancel(bench, agent, TALKER)))
    return results


def print_results(results: Sequence[Result]) -> None:
    """A table on stdout."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("client", "version", "connected", "streamed", "called a tool", "cancelled"):
        table.add_column(heading)
    for result in results:
        cells = [_cell(outcome) for outcome in result.outcomes]
        table.add_row(result.agent.name, VERSIONS[result.agent.package], *cells)
    Console(width=None if sys.stdout.isatty() else _COLUMNS).print(table)


def _cell(outcome: Outcome) -> str:
    word = {True: "yes", False: "NO", None: "-"}[outcome.ok]
    return f"{word} ({outcome.note})" if outcome.note else word


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="some clients (all)")
    parser.add_argument("--work", type=Path, help="keep what the clients wrote in this folder, a new one")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def choose(names: Sequence[str]) -> list[Agent]:
    """The clients of these names."""
    known = {agent.name: agent for agent in AGENTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"no client {', '.join(unknown)}; there are: {', '.join(known)}")
    return [known[name] for name in names] or list(AGENTS)


def main() -> None:
    arguments = parse_arguments()
    agents = choose(arguments.names)
    if not arguments.inside:
        install(INSTALLED)
        kept_model()
        if can_isolate():
            raise SystemExit(run_isolated([sys.executable, *sys.argv, "--inside"]))
        print("no network namespace can be had: clients keep quiet by their settings alone", file=sys.stderr)
    else:
        bring_up_loopback()
    with contextlib.ExitStack() as opened:
        home = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="quantd-clients-")))
        work = arguments.work or home / "work"
        work.mkdir()
        prepare_models(home)
        with daemon(home) as url:
            results = asyncio.run(try_all(agents, work.absolute(), home, url))
    print_results(results)
    if any(outcome.ok is False for result in results for outcome in result.outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
