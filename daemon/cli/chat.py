"""The chat on a terminal: line editing with a history, multi-line messages, and slash commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from quantd.daemon.cli.conversation import Conversation
from quantd.daemon.errors import DaemonError

_HISTORY_LENGTH = 1000
_FENCE = '"""'

_HELP = f"""\
/set NAME VALUE  temperature, top_p, max_tokens, seed or system; without VALUE: the default again
/set             what is set
/clear           forget the conversation
/bye             leave (or Ctrl-D)
{_FENCE}              begins and ends a message of several lines
Ctrl-C           stops an answer"""

_PARAMETERS: dict[str, Callable[[str], float]] = {
    "temperature": float,
    "top_p": float,
    "max_tokens": int,
    "seed": int,
}


def chat(conversation: Conversation, history: Path, verbose: bool) -> None:
    """Answer until the user leaves. A failed answer is told and the chat goes on."""
    click.echo(f"{conversation.model}: /help for help, Ctrl-D to leave")
    with _history(history):
        while True:
            try:
                message, fenced = _read_message()
                if message.startswith("/") and not fenced:
                    _obey(conversation, message)
                elif message.strip():
                    print_answer(conversation, message, verbose)
            except KeyboardInterrupt:
                click.echo()
            except DaemonError as error:
                click.echo(f"Error: {error}", err=True)
            except EOFError:
                click.echo()
                return


def _read_message() -> tuple[str, bool]:
    """One message, and whether it stood between fences (and so is no command)."""
    line = input(">>> ")
    if not line.startswith(_FENCE):
        return line, False
    text = line.removeprefix(_FENCE)
    while not text.endswith(_FENCE):
        text += "\n" + input("... ")
    return text.removesuffix(_FENCE).strip("\n"), True


def print_answer(conversation: Conversation, message: str, verbose: bool) -> None:
    """Ask, and print the answer as it comes. Raises DaemonError, which is told on a line of its own."""
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        click.echo(text, nl=False)

    try:
        answer = conversation.ask(message, write)
    except DaemonError:
        click.echo(nl=bool(written))
        raise
    click.echo()
    if verbose:
        click.echo(answer.summary, err=True)


def _obey(conversation: Conversation, line: str) -> None:
    """Carry out a slash command. Raises EOFError for the one that leaves."""
    name, _, argument = line.partition(" ")
    command = _COMMANDS.get(name)
    if command is None:
        click.echo(
            f"No command {name}; /help lists them. A message that begins with / goes between {_FENCE}."
        )
    else:
        command(conversation, argument.strip())


def _help(conversation: Conversation, argument: str) -> None:
    click.echo(_HELP)


def _clear(conversation: Conversation, argument: str) -> None:
    conversation.messages.clear()
    click.echo("The conversation is forgotten.")


def _bye(conversation: Conversation, argument: str) -> None:
    raise EOFError


def _set(conversation: Conversation, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if not name:
        settings = {"system": conversation.system, **conversation.sampling}
        for key, shown in settings.items():
            click.echo(f"{key} {'-' if shown is None else shown}")
    elif name == "system":
        conversation.system = value.strip() or None
    elif name not in _PARAMETERS:
        click.echo(f"{name} cannot be set; these can: {', '.join(_PARAMETERS)}, system")
    elif not value.strip():
        conversation.sampling.pop(name, None)
    else:
        _set_number(conversation, name, value.strip())


def _set_number(conversation: Conversation, name: str, value: str) -> None:
    try:
        conversation.sampling[name] = _PARAMETERS[name](value)
    except ValueError:
        click.echo(f"{name} takes a number, not {value!r}")


_COMMANDS: dict[str, Callable[[Conversation, str], None]] = {
    "/help": _help,
    "/clear": _clear,
    "/set": _set,
    "/bye": _bye,
}


@contextmanager
def _history(path: Path) -> Iterator[None]:
    """Lines of former chats on the arrow keys; those of this one are added to the file, which is private."""
    try:
        import readline  # which some builds of Python lack
    except ImportError:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LENGTH)
    try:
        yield
    finally:
        readline.write_history_file(path)
