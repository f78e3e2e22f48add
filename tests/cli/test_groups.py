"""A command that does not exist: the error names what comes near it, or else what there is."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from quantd.daemon.cli.commands import cli


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("lod", "there is no command 'lod'; did you mean load?"),
        ("keys", "there is no command 'keys'; did you mean key?"),
        ("chat", "there is no command 'chat'; there are: serve, run, pull, "),
        ("service foo", "there is no command 'foo'; there are: install, status, uninstall\n"),
        ("cache list", "there is no command 'list'; did you mean ls?"),
        ("key ad", "there is no command 'ad'; did you mean add?"),
    ],
)
def test_an_unknown_command_is_answered_with_those_near_it(typed: str, said: str) -> None:
    result = CliRunner().invoke(cli, typed.split())
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize("typed", ["--hlp", "cache --hlp"])
def test_an_unknown_option_is_no_command(typed: str) -> None:
    result = CliRunner().invoke(cli, typed.split())
    assert result.exit_code == 2
    assert "--hlp" in result.output and "no command" not in result.output
