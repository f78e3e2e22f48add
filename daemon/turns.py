"""Conversations for templates that take one system message, and what the user says only by turns.

Agents send several system messages, also between the others, and the user's words in several messages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from quantd.daemon.templates import Message


def by_turns(messages: Sequence[Message]) -> list[Message]:
    """One system message at most, at the start, and no two of the user in a row; nothing is lost.

    System messages at the start are one. Later ones are said by the user, as part of what else the user
    says there. An empty line is between what was apart.
    """
    first = list(itertools.takewhile(_is_system, messages))
    later = [
        message | {"role": "user"} if _is_system(message) else message for message in messages[len(first) :]
    ]
    found: list[Message] = []
    for message in [*first, *later]:
        if found and found[-1]["role"] == message["role"] in ("system", "user"):
            found[-1] = found[-1] | {"content": f"{found[-1]['content']}\n\n{message['content']}"}
        else:
            found.append(message)
    return found


def _is_system(message: Message) -> bool:
    return bool(message["role"] == "system")
