"""Groups of commands, which answer a name that they lack with those that they have."""

from __future__ import annotations

import difflib

import click


class CommandGroup(click.Group):
    """A group whose error for an unknown command names those near it, or all.

    Click knows only commands that were added to a group, not those that one finds by name.
    """

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        is_option = name.startswith("-")
        if not is_option and not ctx.resilient_parsing and self.get_command(ctx, name) is None:
            ctx.fail(f"there is no command {name!r}; {self._hint(ctx, name)}")
        return super().resolve_command(ctx, args)

    def _hint(self, ctx: click.Context, name: str) -> str:
        commands = ((known, self.get_command(ctx, known)) for known in self.list_commands(ctx))
        names = [known for known, command in commands if command is not None and not command.hidden]
        near = difflib.get_close_matches(name, names, n=1)
        return f"did you mean {near[0]}?" if near else f"there are: {', '.join(names)}"
