"""What the README names is there: commands, flags, sections."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from quantd.daemon.cli.commands import cli

README = (Path(__file__).parent.parent / "README.md").read_text()
FENCED = re.findall(r"^```\w*\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
CALLS = re.compile(r"^(?:.*\| |\$ |QUANTD_KEY=\S+ )?quantd ([a-z].*)$", re.MULTILINE)


def subcommand(name: str) -> click.Command:
    with click.Context(cli) as context:
        command = cli.get_command(context, name)
    assert command is not None, f"the README has `quantd {name}`"
    return command


def options(command: click.Command) -> set[str]:
    return {name for each in command.params for name in (*each.opts, *each.secondary_opts)}


@pytest.mark.parametrize("line", [line.partition(" #")[0] for text in FENCED for line in CALLS.findall(text)])
def test_commands_and_their_flags_are_there(line: str) -> None:
    names = [part.split()[0] for part in re.split(r" \| (?!--)", line)]
    command = subcommand(names[0])
    if isinstance(command, click.Group):
        assert {line.split()[1], *names[1:]} <= set(command.commands)
        return
    known = set.union(*(options(subcommand(name)) for name in names))
    assert set(re.findall(r"(?<=\s)--[a-z][a-z-]*", line)) <= known


def test_the_table_of_settings_has_every_flag_of_serve() -> None:
    table = README.partition("## Configuration")[2].partition("## ")[0]
    first = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
    assert {flag for cell in first for flag in re.findall(r"--[a-z-]+[a-z]", cell)} == options(
        subcommand("serve")
    )


def test_links_lead_to_sections() -> None:
    titles = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors
