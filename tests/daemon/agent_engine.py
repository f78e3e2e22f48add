"""Engines that say what a test wants, one of them like an agent's model; and what they were asked last."""

from __future__ import annotations

from daemon_in_loop import Daemon

from quantd.engine.request import Request

# Hermes' calls and thoughts in tags; what it gets can be read in the prompt.
TEMPLATE = (
    "{# <tool_call> arguments <think> #}"
    "{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}"
    "{% endfor %}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
)
ASKS = (
    "<think>Let me look.</think>\n\nI look.\n"
    '<tool_call>\n{"name": "read_gauge", "arguments": {"n": 4}}\n</tool_call>'
)
ANSWER = "<think>So.</think>\n\nIt is 12 bar."


def be_an_agent(daemon: Daemon) -> None:
    """Of a daemon that has its model loaded."""
    tokenizer = daemon.service.models.entries[0].model.tokenizer

    def script(request: Request) -> list[int]:
        answer = ANSWER if "[tool]" in tokenizer.decode(request.prompt) else ASKS
        return [*tokenizer.encode(answer), 2]

    daemon.engine.script = script


def say(daemon: Daemon, text: str) -> None:
    """Make the engine of a daemon that has its model loaded answer this."""
    ids = daemon.service.models.entries[0].model.tokenizer.encode(text)
    daemon.engine.script = lambda request: [*ids, 2]


def last_grammar(daemon: Daemon) -> str | None:
    """What the last answer had to be."""
    return daemon.engine.seen[-1].sampling.grammar


def last_prompt(daemon: Daemon) -> str:
    """What the engine was asked last."""
    return daemon.service.models.entries[0].model.tokenizer.decode(daemon.engine.seen[-1].prompt)
