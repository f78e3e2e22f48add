"""What is left out of a conversation that does not fit, where a request asks for that."""

from __future__ import annotations

import pytest

from quantd.daemon.templates import Message
from quantd.daemon.truncation import shortened


def conversation(text: str) -> list[Message]:
    """One message for each letter: s(ystem), u(ser), a(ssistant), t(ool); its content is its place."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[letter], "content": str(place)} for place, letter in enumerate(text)]


@pytest.mark.parametrize(
    ("letters", "room", "kept"),
    [
        ("uauau", 5, "01234"),
        ("uauau", 4, "234"),
        ("uauau", 3, "234"),
        ("uauau", 2, "4"),
        ("uauau", 0, "4"),
        ("suauau", 4, "0345"),
        ("suauau", 1, "05"),
        ("uatauatatu", 5, "9"),
        ("uatauatatu", 6, "456789"),
        ("uasuau", 4, "2345"),
        ("u", 0, "0"),
        ("sat", 0, "012"),
        ("", 0, ""),
    ],
)
def test_the_oldest_turns_go(letters: str, room: int, kept: str) -> None:
    left = shortened(conversation(letters), lambda messages: len(messages) <= room)
    assert "".join(message["content"] for message in left) == kept


def test_long_conversations_are_tried_a_few_times_only() -> None:
    tried = []

    def fits(messages: object) -> bool:
        tried.append(messages)
        return False

    shortened(conversation("ua" * 1000), fits)
    assert len(tried) < 12
