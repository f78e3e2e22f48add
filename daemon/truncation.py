"""A conversation without its oldest turns, for requests that ask for that where it does not fit."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from quantd.daemon.templates import Message


def shortened(messages: Sequence[Message], fits: Callable[[Sequence[Message]], bool]) -> Sequence[Message]:
    """The conversation without as many of its oldest turns as it takes to fit.

    A turn begins with a user's message and goes as a whole, so that no tool's answer loses its call.
    System messages and the last turn stay; where those alone do not fit, they are returned all the same.
    """
    starts = [index for index, message in enumerate(messages) if message["role"] == "user"]
    choices = [messages, *(_from(messages, start) for start in starts[1:])]
    return choices[bisect_left(choices[:-1], True, key=fits)]


def _from(messages: Sequence[Message], start: int) -> list[Message]:
    """The messages from `start` on, behind the system messages before it."""
    return [message for message in messages[:start] if message["role"] == "system"] + list(messages[start:])
