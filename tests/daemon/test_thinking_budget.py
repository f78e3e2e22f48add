"""Limits of reasoning: by which fields clients ask, and what an engine is told where it can be done."""

from __future__ import annotations

from typing import Any

import pytest
from agent_engine import TEMPLATE
from daemon_in_loop import in_loop, running_daemon

from quantd.engine.request import ThinkingBudget

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
CHAT, ANTHROPIC = "/v1/chat/completions", "/v1/messages"
TAGS = ("<think>", "</think>")
OPENING, CLOSING = 514, 515


@pytest.mark.parametrize(
    ("path", "fields", "budget"),
    [
        (CHAT, {"thinking_token_budget": 7}, 7),
        (CHAT, {"thinking_budget_tokens": 0}, 0),
        (CHAT, {"reasoning_budget_tokens": 7}, 7),
        (CHAT, {"thinking_budget_tokens": -1}, None),
        (CHAT, {}, None),
        (ANTHROPIC, {"thinking": {"type": "enabled", "budget_tokens": 1024}}, 1024),
        (ANTHROPIC, {"thinking": {"type": "adaptive"}}, None),
    ],
)
def test_fields(path: str, fields: dict[str, Any], budget: int | None) -> None:
    async def ask() -> None:
        async with running_daemon(template=TEMPLATE, tokens=TAGS) as daemon:
            status, reply = await daemon.post(path, BODY | fields)
            assert status == 200, reply
            expected = None if budget is None else ThinkingBudget(budget, CLOSING, OPENING)
            assert daemon.engine.seen[-1].sampling.thinking == expected

    in_loop(ask)()


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        (TEMPLATE + "<think>\n", TAGS, ThinkingBudget(7, CLOSING)),
        (TEMPLATE + "<think></think>", TAGS, None),
        # What is spelled by several tokens is left to the model.
        (TEMPLATE, (), None),
        (TEMPLATE.replace("<think>", ""), TAGS, None),
    ],
    ids=["inside", "over", "no token", "no reasoning"],
)
def test_where_it_can_be_kept_to(
    template: str, tokens: tuple[str, ...], expected: ThinkingBudget | None
) -> None:
    async def ask() -> None:
        async with running_daemon(template=template, tokens=tokens) as daemon:
            assert (await daemon.post(CHAT, BODY | {"thinking_token_budget": 7}))[0] == 200
            assert daemon.engine.seen[-1].sampling.thinking == expected

    in_loop(ask)()


@in_loop
async def test_refused_by_name() -> None:
    async with running_daemon(template=TEMPLATE) as daemon:
        for path, fields, name in (
            (CHAT, {"thinking_token_budget": -2}, "thinking_token_budget"),
            (ANTHROPIC, {"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ):
            status, reply = await daemon.post(path, BODY | fields)
            assert status == 400 and name in reply["error"]["message"]
