"""`quantd run`: one answer, or a chat; with a daemon of its own if none runs."""

from __future__ import annotations

import sys
from typing import Any

import click

from quantd.daemon.catalogue import CATALOGUE
from quantd.daemon.cli.chat import chat, print_answer
from quantd.daemon.cli.client import DaemonClient
from quantd.daemon.cli.control import describe, load_model
from quantd.daemon.cli.conversation import Answer, Conversation
from quantd.daemon.cli.models import pull_model
from quantd.daemon.cli.options import client_options, json_option, model_argument
from quantd.daemon.cli.output import format_bytes, print_json
from quantd.daemon.cli.spawn import daemon_for_command
from quantd.daemon.config import Paths
from quantd.daemon.errors import DaemonError
from quantd.engine.messages import ModelInfo


@click.command("run")
@model_argument
@click.argument("prompt", required=False)
@click.option("--system", metavar="TEXT", help="System message.")
@click.option(
    "--temperature",
    type=float,
    help="0 always takes the likeliest token. Default: 0 for a PROMPT, the model's in a chat.",
)
@click.option("--top-p", type=float, help="Draw from the likeliest tokens of this total probability.")
@click.option("--max-tokens", type=int, help="Most tokens to answer with.")
@click.option("--seed", type=int, help="The same seed gives the same answer.")
@click.option("--pull", is_flag=True, help="Fetch the model if it is not there.")
@click.option("--verbose", "-v", is_flag=True, help="Print on stderr what ran where, and how fast.")
@client_options
@json_option
def run_command(
    name: str,
    prompt: str | None,
    system: str | None,
    pull: bool,
    verbose: bool,
    socket: str | None,
    host: str | None,
    as_json: bool,
    **sampling: float | None,
) -> None:
    """Answer PROMPT (or what is piped in), or chat if there is none."""
    prompt = _prompt(prompt)
    if prompt is None and as_json:
        raise click.UsageError("--json needs a PROMPT.")
    paths = Paths.from_env()
    with daemon_for_command(socket, host, paths.log) as client:
        name, info = _load(client, name, pull)
        if verbose and info is not None:
            click.echo(f"{name} over {client.url}: {describe(info)}", err=True)
        given = {key: value for key, value in sampling.items() if value is not None}
        # A script gets the same answer each time; a chat samples as the model's authors mean it to.
        defaults = {} if prompt is None else {"temperature": 0.0}
        conversation = Conversation(client, name, system, defaults | given)
        if prompt is None:
            chat(conversation, paths.state / "chat_history", verbose)
        elif as_json:
            print_json(_as_dict(conversation, conversation.ask(prompt, lambda text: None)))
        else:
            print_answer(conversation, prompt, verbose)


def _prompt(argument: str | None) -> str | None:
    """The question: the argument, or what is piped in; None for a chat on a terminal."""
    if argument is None and sys.stdin.isatty():
        return None
    try:
        text = sys.stdin.buffer.read().decode() if argument is None else argument.encode().decode()
    except UnicodeError:
        raise click.UsageError("The prompt is not UTF-8.") from None
    if not text.strip():
        raise click.UsageError("The prompt is empty.")
    return text


def _load(client: DaemonClient, name: str, pull: bool) -> tuple[str, ModelInfo | None]:
    """Load the model; one that is missing is fetched first where the user wants that. Its name, and info.

    Who has no right to load gets no info: then the first question has the model loaded.
    """
    try:
        return name, load_model(client, name)
    except DaemonError as error:
        if error.code == "not_allowed":
            return name, None
        if error.code != "model_not_found" or not (pull or _wants_pull(name)):
            raise
    fetched = pull_model(name, None).name
    return fetched, load_model(client, fetched)


def _wants_pull(name: str) -> bool:
    """Ask on a terminal whether to fetch a model that the catalogue has."""
    if name not in CATALOGUE or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    entry = CATALOGUE[name]
    size = format_bytes(entry.download_bytes)
    return click.confirm(f"{name} is not here. Fetch {entry.title} ({size})?", default=True, err=True)


def _as_dict(conversation: Conversation, answer: Answer) -> dict[str, Any]:
    return {
        "model": conversation.model,
        "content": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": answer.usage,
        "first_token_seconds": round(answer.first_seconds, 4),
        "tokens_per_second": round(answer.tokens_per_second, 2),
        "seconds": round(answer.seconds, 4),
        "daemon": conversation.client.url,
    }
