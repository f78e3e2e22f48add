"""`quantd connect`: what other programs have to be told, printed, or written where they read it."""

from __future__ import annotations

import difflib
import os
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from quantd.daemon.cli.options import client_options, json_option
from quantd.daemon.cli.output import print_json, print_table
from quantd.daemon.config import Paths, client_key, load_config
from quantd.daemon.errors import ConfigError

if TYPE_CHECKING:
    from quantd.daemon.connect.edit import ConfigFile, Outcome
    from quantd.daemon.connect.endpoint import Endpoint
    from quantd.daemon.connect.journal import Journal
    from quantd.daemon.connect.tool import Tool


def _complete(context: click.Context, parameter: click.Parameter, typed: str) -> list[str]:
    return [name for name in _tools() if name.startswith(typed)]


@click.command("connect")
@click.argument("name", required=False, shell_complete=_complete)
@click.option(
    "--write", is_flag=True, help="Put it into the program's own files; a backup is kept beside each."
)
@click.option("--undo", is_flag=True, help="Put those files back as they were.")
@click.option("--replace", is_flag=True, help="With --write: also where you have set something else.")
@click.option("--model", help="The model to tell it of. Default: the one that is loaded, or the only one.")
@click.option("--key", help="The API key for it to send. Default: this user's (QUANTD_KEY), if any.")
@client_options
@json_option
def connect_command(
    name: str | None,
    write: bool,
    undo: bool,
    replace: bool,
    model: str | None,
    key: str | None,
    socket: str | None,
    host: str | None,
    as_json: bool,
) -> None:
    """Show what an editor or agent has to be told to use quantd. Without NAME, list those that are known."""
    if (write and undo) or (replace and not write):
        raise click.UsageError("--undo goes without --write, --replace only with it.")
    if name is None:
        _list(as_json)
    elif undo:
        _undo(_find(name), as_json)
    else:
        _connect(_find(name), _endpoint(socket, host, model, key), write, replace, as_json)


def _list(as_json: bool) -> None:
    tools = _tools().values()
    if as_json:
        print_json([{"name": tool.name, "title": tool.title, "reads": tool.reads} for tool in tools])
    else:
        print_table(("NAME", "WHAT", "READS"), [(tool.name, tool.title, tool.reads) for tool in tools])


def _connect(tool: Tool, endpoint: Endpoint, is_written: bool, replace: bool, as_json: bool) -> None:
    from quantd.daemon.connect.folders import UserFolders

    files = tool.files(endpoint, UserFolders(os.environ | {}))
    outcomes = _write(tool, files, replace) if is_written else []
    if as_json:
        print_json(_as_dict(tool, endpoint, files) | {"written": list(map(_outcome_as_dict, outcomes))})
        return
    lines = _told(outcomes) if is_written else _shown(tool, files)
    for line in (*lines, *_variables(tool, endpoint), *_afterwards(tool, endpoint)):
        click.echo(line)


def _write(tool: Tool, files: Sequence[ConfigFile], replace: bool) -> list[Outcome]:
    from quantd.daemon.connect.edit import write

    if not files:
        raise ConfigError(
            f"{tool.name}: there is no file to write, it reads {tool.reads}; leave out --write for what to do"
        )
    return write(tool.name, files, _journal(), replace)


def _undo(tool: Tool, as_json: bool) -> None:
    from quantd.daemon.connect.edit import undo

    outcomes = undo(tool.name, _journal())
    if as_json:
        print_json({"name": tool.name, "undone": list(map(_outcome_as_dict, outcomes))})
    else:
        click.echo("\n".join(_told(outcomes)))


def _tools() -> Mapping[str, Tool]:
    from quantd.daemon.connect.tools import (
        TOOLS,
    )  # with the parsers of every format, which no other command needs

    return TOOLS


def _find(name: str) -> Tool:
    tools = _tools()
    if name in tools:
        return tools[name]
    near = difflib.get_close_matches(name, tools, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(tools)}"
    raise ConfigError(f"no program {name!r} is known here; {hint}")


def _endpoint(socket: str | None, host: str | None, model: str | None, key: str | None) -> Endpoint:
    from quantd.daemon.cli.endpoint import find_endpoint

    return find_endpoint(socket, host, model, key or client_key(), load_config({}))


def _journal() -> Journal:
    from quantd.daemon.connect.journal import Journal

    return Journal(Paths.from_env().state / "connect")


def _shown(tool: Tool, files: Sequence[ConfigFile]) -> Iterator[str]:
    for file in files:
        yield f"{file.path}\n"
        yield textwrap.indent(file.preview(), "    ")
    if files:
        yield f"quantd connect {tool.name} --write puts that there, beside what you have."


def _variables(tool: Tool, endpoint: Endpoint) -> Iterator[str]:
    if variables := tool.variables(endpoint):
        yield "Variables of its environment\n"
        yield from (f"    {name}={shlex.quote(value)}" for name, value in variables.items())


def _told(outcomes: Sequence[Outcome]) -> Iterator[str]:
    for outcome in outcomes:
        yield f"{outcome.path}: {outcome.done}"
        if outcome.backup is not None:
            yield f"  as it was: {outcome.backup}"
        yield from (f"  {kept}" for kept in outcome.kept)


def _afterwards(tool: Tool, endpoint: Endpoint) -> Iterator[str]:
    """What is left to do, and how to see that it works."""
    for step in (*tool.steps(endpoint), *_notes(tool, endpoint)):
        yield f"- {step}"
    tests = _tests(tool, endpoint)
    yield from ("\nTest:", *(f"  {line}" for line in tests)) if tests else ()


def _notes(tool: Tool, endpoint: Endpoint) -> Iterator[str]:
    if not endpoint.answers:
        yield "No daemon answers now; start it with: quantd serve"
    if endpoint.wants_key:
        yield (
            f"The daemon refuses {'this key' if endpoint.key else 'programs without a key'}; repeat this "
            f"with one made for {tool.name}: --key $(quantd key add {tool.name})"
        )
    if not endpoint.is_loaded and endpoint.max_model_len is not None:
        yield (
            f"{endpoint.model} is not loaded. {endpoint.max_model_len} tokens is the most that it can take; "
            "repeat this once it is, in case memory allows less."
        )
    if endpoint.max_model_len is not None and endpoint.max_model_len < 2 * tool.own_tokens:
        yield (
            f"{tool.name} needs about {tool.own_tokens} tokens for its own instructions and tools; the "
            f"{endpoint.max_model_len} of {endpoint.model} leave little or nothing for work."
        )
    if not all(probe.suits(endpoint) for probe in tool.probes):
        yield f"{endpoint.model} has no tokens for infill; completion needs a model that has (--model)."


def _tests(tool: Tool, endpoint: Endpoint) -> list[str]:
    return [probe.line(endpoint) for probe in tool.probes if probe.suits(endpoint)]


def _as_dict(tool: Tool, endpoint: Endpoint, files: Sequence[ConfigFile]) -> dict[str, Any]:
    return {
        "name": tool.name,
        "title": tool.title,
        "url": endpoint.root,
        "model": endpoint.model,
        "context": endpoint.max_model_len,
        "files": [
            {"path": str(file.path), "format": file.format, "content": file.preview()} for file in files
        ],
        "variables": dict(tool.variables(endpoint)),
        "steps": list(tool.steps(endpoint)),
        "notes": list(_notes(tool, endpoint)),
        "tests": _tests(tool, endpoint),
    }


def _outcome_as_dict(outcome: Outcome) -> dict[str, Any]:
    backup = None if outcome.backup is None else str(outcome.backup)
    return {"path": str(outcome.path), "done": outcome.done, "backup": backup, "kept": list(outcome.kept)}
