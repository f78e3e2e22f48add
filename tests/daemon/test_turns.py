"""Conversations that a template refuses as they come, and takes by turns."""

from __future__ import annotations

from typing import Any

import pytest
from daemon_in_loop import in_loop, running_daemon

from quantd.daemon.turns import by_turns


def conversation(text: str) -> list[dict[str, str]]:
    """`s:a u:b` as messages."""
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[word[0]], "content": word[2:]} for word in text.split()]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("s:1 u:2 a:3 u:4", "s:1 u:2 a:3 u:4"),
        ("s:1 s:2 u:3", "s:1+2 u:3"),
        ("u:1 s:2", "u:1+2"),
        ("s:1 u:2 s:3 s:4 u:5 a:6", "s:1 u:2+3+4+5 a:6"),
        ("u:1 a:2 s:3 u:4", "u:1 a:2 u:3+4"),
        ("u:1 a:2 t:3 t:4 s:5", "u:1 a:2 t:3 t:4 u:5"),
        ("a:1 a:2 t:3", "a:1 a:2 t:3"),
        ("s:1", "s:1"),
    ],
)
def test_one_system_message_and_users_by_turns(before: str, after: str) -> None:
    messages = conversation(before)
    expected = [m | {"content": m["content"].replace("+", "\n\n")} for m in conversation(after)]
    assert by_turns(messages) == expected
    assert messages == conversation(before)
    assert by_turns(expected) == expected


# In the manner of templates of Gemma's and of newer Qwens'.
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    "{% if not loop.first and m.role == loop.previtem.role %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@in_loop
async def test_strict_templates_take_what_agents_send() -> None:
    """Claude Code ends with a system message; Codex begins with two, and goes on with two of the user."""
    claude: dict[str, Any] = {"max_tokens": 1, "system": "A", "messages": conversation("u:1 s:2")}
    codex: dict[str, Any] = {"max_output_tokens": 1, "input": conversation("s:A s:B u:1 u:2")}
    chat: dict[str, Any] = {"max_tokens": 1, "messages": conversation("s:A u:1 a:2 s:3 u:4")}
    async with running_daemon(template=STRICT) as daemon:
        for path, body, prompt in (
            ("/v1/messages", claude, "[system]A[user]1\n\n2"),
            ("/v1/responses", codex, "[system]A\n\nB[user]1\n\n2"),
            ("/v1/chat/completions", chat, "[system]A[user]1[assistant]2[user]3\n\n4"),
        ):
            status, answer = await daemon.post(path, body)
            assert status == 200, answer
            tokenizer = daemon.service.models.entries[0].model.tokenizer
            assert tokenizer.decode(daemon.engine.seen[-1].prompt) == prompt
        twice = {"messages": conversation("u:1 a:2 a:3 u:4")}
        for messages in (twice["messages"], conversation("s:A s:B u:1 a:2 a:3 u:4")):
            status, answer = await daemon.post("/v1/chat/completions", {"messages": messages})
            assert status == 400 and answer["error"]["param"] == "messages"
        assert "must be at the beginning" in answer["error"]["message"]
