"""Chat templates as hostile programs: they take no more than their time and memory, and hold nobody up."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from functools import partial

import pytest
from daemon_in_loop import in_loop, running_daemon
from fake_models import CHATML
from test_templates import CALLS, GEMMA, LLAMA3, SPECIAL, TALK, TOOLS, WITH_SYSTEM

from quantd.daemon import templates
from quantd.daemon.template_process import TemplateProcess
from quantd.daemon.templates import ChatTemplate
from quantd.daemon.tokenizer import Tokenizer
from quantd.engine.errors import RequestError
from quantd.quant.errors import CheckpointError

LOOPS = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4
DOUBLING = "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
TEXTS = "{% set ns = namespace(x='a') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
HOSTILE = {
    "loops": LOOPS,
    "a long text": "{{ 'a' * 10**10 }}",
    "a folded text": "{{ 'a'|center(10000000000) }}",
    "a large number": "{{ 9**(9**9) }}",
    "a wide format": "{{ '%10000000000d' % 1 }}",
    "a list": "{{ [0] * 10**10 }}",
    "texts in texts": "{{ ('a' * 9**6).replace('a', 'b' * 9**6) }}",
    "a list of itself": DOUBLING + "{{ ns.x }}",
    "lists compared": DOUBLING + "{% set a = namespace(x=ns.x) %}" + DOUBLING + "{{ a.x == ns.x }}",
    "doubled texts": TEXTS,
    "much output": "{% for i in range(99999) %}{{ '%10000d' % 1 }}{% endfor %}",
    "macros": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
}


@pytest.fixture(scope="module")
def run() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.close()


@pytest.fixture(scope="module")
def run_shortly() -> Iterator[TemplateProcess]:
    process = TemplateProcess(seconds=0.5)
    yield process
    process.close()


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_are_refused(run_shortly: TemplateProcess, source: str) -> None:
    with pytest.raises(RequestError, match="chat template") as caught:
        ChatTemplate(source, {}, run_shortly).render(TALK)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("source", "messages", "tools"),
    [(LLAMA3, WITH_SYSTEM, TOOLS), (LLAMA3, CALLS, TOOLS), (GEMMA, TALK, None)],
    ids=["system", "calls", "gemma"],
)
def test_the_process_says_what_the_template_says(run: TemplateProcess, source, messages, tools) -> None:
    here = ChatTemplate(source, SPECIAL).render(messages, tools)
    assert ChatTemplate(source, SPECIAL, run).render(messages, tools) == here


def test_refusals_and_odd_values_cross_over(run: TemplateProcess) -> None:
    with pytest.raises(RequestError, match="System role not supported"):
        ChatTemplate(GEMMA, SPECIAL, run).render(WITH_SYSTEM)
    odd = {"a": 10**30, "b": "\ud800\u2028", "c": 1e400, "d": None}
    source = "{{ a }}|{{ b }}|{{ c }}|{{ d is none }}"
    assert ChatTemplate(source, {}, run).render([], variables=odd) == f"{10**30}|\ud800\u2028|inf|True"


def test_a_process_that_ends_at_once_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    process = TemplateProcess(command=(sys.executable, "-c", "pass"))
    with pytest.raises(RequestError, match="too much memory"):
        ChatTemplate("a", {}, process).render([])
    process.close()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("(" * 100_000, "not valid|too deeply"),
        ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "too deeply"),
        ("a" * (templates._MOST_SOURCE + 1), "longer than"),
    ],
    ids=["text", "deep", "long"],
)
def test_templates_that_cannot_be_read_are_refused(source: str, reason: str) -> None:
    if source.startswith("(("):
        assert ChatTemplate(source, {}).render([]) == source
        return
    with pytest.raises(CheckpointError, match=reason):
        ChatTemplate(source, {})


def test_a_template_is_not_run_when_it_is_read() -> None:
    """Compiling one computes what is constant in it."""
    ChatTemplate("{{ 'a'|center(10000000000) }}{{ 9**9**9 }}", {})


@in_loop
async def test_the_daemon_answers_others_while_a_template_runs() -> None:
    """A model's own and a client's: both are told, and nobody else waits for them."""
    run, run_guests = TemplateProcess(seconds=1.0), TemplateProcess(seconds=1.0)
    load = partial(Tokenizer.load, run=run, run_guests=run_guests)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    generate = {"model": "tiny", "prompt": "hi", "template": LOOPS, "stream": False}
    source = f"{{% if messages[0].content == 'loop' %}}{LOOPS}{{% endif %}}{CHATML}"
    async with running_daemon(template=source, load_tokenizer=load) as daemon:
        assert (await daemon.post("/v1/chat/completions", chat))[0] == 200
        looping = {"messages": [{"role": "user", "content": "loop"}]}
        hostile = [
            asyncio.create_task(daemon.post("/v1/chat/completions", looping)),
            asyncio.create_task(daemon.post("/api/generate", generate)),
        ]
        num_answered = 0
        while not all(task.done() for task in hostile):
            assert (await daemon.get("/quantd/version"))[0] == 200
            num_answered += 1
            await asyncio.sleep(0.02)
        assert num_answered > 5, "a loop that waits for a template answers once or twice"
        for status, body in [task.result() for task in hostile]:
            assert status == 400 and "takes longer than 1 s" in str(body)
        assert (await daemon.post("/v1/chat/completions", chat))[0] == 200
    run.close()
    run_guests.close()
