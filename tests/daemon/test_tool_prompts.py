"""What templates are told of tools, calls and results: natively where they can take it, else in words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quantd.daemon.templates import ChatTemplate
from quantd.daemon.tool_formats.families import GENERIC, HERMES, LLAMA
from quantd.daemon.tool_prompts import ToolPrompts

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# In the manner of the families' own templates, each with what is peculiar to it.
CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
"""
QWEN = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Answer with <tool_call>
{"name": NAME, "arguments": ARGUMENTS}
</tool_call><|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}{% for call in m.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}"""
LLAMA3 = """{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}
<|start_header_id|>{{ m.role }}<|end_header_id|>
{% if 'tool_calls' in m %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{
m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}{% endfor %}"""
# Takes no tools, arguments as texts, and calls only where the content is null.
DEEPSEEK_R1 = """{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}
{% for c in m.tool_calls %}{{ '<｜tool▁calls▁begin｜>' + c.function.name + '\n```json\n' }}
{{- c.function.arguments + '' }}{% endfor %}{% elif m.role == 'tool' %}<｜tool▁output▁begin｜>{{ m.content }}
{% else %}{{ m.role + ': ' + m.content }}{% endif %}
{% endfor %}<｜Assistant｜><think>
"""
MISTRAL = """{{ bos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}
{%- if m.tool_calls is not defined and m.role != 'tool' %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}
{%- if m.role == 'user' %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS][INST]{{ m.content }}[/INST]
{%- elif m.tool_calls is defined %}[TOOL_CALLS][{% for c in m.tool_calls %}{% if c.id | length != 9 %}
{{- raise_exception('nine') }}{% endif %}{{ c.function | tojson }}, "id": "{{ c.id }}"{% endfor %}]
{%- elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}
[TOOL_RESULTS]{{ m.content }} {{ m.tool_call_id }}[/TOOL_RESULTS]
{%- else %}{{ m.content }}{% endif %}{% endfor %}"""
# Takes tools but shows no calls.
GRANITE = """{% if tools %}{{ tools | tojson }} answer with <|tool_call|> and a list{% endif %}
{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}{% endfor %}"""
GEMMA = """{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}
{%- for m in messages %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{ m.role }}: {{ m.content }}{% endfor %}"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_gauge",
            "description": "Reads a gauge.",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
        },
    }
]
CALL = {"id": "call_g4", "type": "function", "function": {"name": "read_gauge", "arguments": {"n": 47}}}
QUESTION = {"role": "user", "content": "Read gauge 47."}
RESULT = {"role": "tool", "tool_call_id": "call_g4", "content": "12.5 bar"}


def round_trip(content: str = "") -> list[dict[str, Any]]:
    return [QUESTION, {"role": "assistant", "content": content, "tool_calls": [CALL]}, RESULT]


def rendered(source: str, messages: list[dict[str, Any]], tools: Any = None) -> str:
    template = ChatTemplate(source, SPECIAL)
    return template.render(*ToolPrompts(template).place(messages, tools))


FAMILIES = {
    "chatml": CHATML,
    "qwen": QWEN,
    "llama 3": LLAMA3,
    "deepseek r1": DEEPSEEK_R1,
    "mistral": MISTRAL,
    "granite": GRANITE,
    "gemma": GEMMA,
}


@pytest.mark.parametrize("content", ["", "I read it."])
@pytest.mark.parametrize("source", FAMILIES.values(), ids=FAMILIES)
def test_no_template_leaves_anything_out(source: str, content: str) -> None:
    text = rendered(source, round_trip(content), TOOLS)
    assert text.count("read_gauge") >= 2 and "Reads a gauge." in text
    assert '"n": 47' in text and "12.5 bar" in text and "None" not in text
    if source not in (LLAMA3, MISTRAL):
        assert content in text


@pytest.mark.parametrize("source", [QWEN, LLAMA3], ids=["qwen", "llama 3"])
def test_what_a_template_takes_it_gets_as_from_transformers(source: str) -> None:
    expected, _ = render_jinja_template(
        conversations=[round_trip()], tools=TOOLS, chat_template=source, add_generation_prompt=True, **SPECIAL
    )
    assert rendered(source, round_trip(), TOOLS) == expected[0]


def test_ids_of_nine_where_a_template_insists() -> None:
    text = rendered(MISTRAL, round_trip(), TOOLS)
    call_id = text.split('"id": "')[1][:9]
    assert call_id.isalnum() and f"12.5 bar {call_id}" in text
    short = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [CALL | {"id": "a1b2c3d4e"}]}]
    assert "a1b2c3d4e" in rendered(MISTRAL, [*short, RESULT | {"tool_call_id": "a1b2c3d4e"}], TOOLS)


def test_templates_without_tools_are_told_in_words() -> None:
    text = rendered(CHATML, [{"role": "system", "content": "Be brief."}, QUESTION], TOOLS)
    system = text.split("<|im_end|>")[0]
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(TOOLS[0]["function"]) in system and "<tool_call>" in system
    assert rendered(CHATML, [QUESTION], TOOLS).startswith("<|im_start|>system\nYou may call")
    assert rendered(GEMMA, [QUESTION], TOOLS).startswith("user: You may call")
    assert rendered(CHATML, [QUESTION], []) == rendered(CHATML, [QUESTION])


def test_results_go_before_what_the_user_says_next() -> None:
    text = rendered(
        GEMMA, [*round_trip(), RESULT | {"content": "13 bar"}, {"role": "user", "content": "So?"}]
    )
    assert text.endswith(
        "user: <tool_response>\n12.5 bar\n</tool_response>\n<tool_response>\n13 bar\n</tool_response>\nSo?"
    )


def test_calls_are_written_in_the_format_that_is_taught() -> None:
    assert '<|tool_call|>[{"name": "read_gauge", "arguments": {"n": 47}}]' in rendered(GRANITE, round_trip())
    cut_off = CALL | {"function": {"name": "read_gauge", "arguments": '{"n": 4'}}
    messages = [QUESTION, {"role": "assistant", "content": "", "tool_calls": [cut_off]}]
    assert r'"arguments": {"arguments": "{\"n\": 4"}' in rendered(CHATML, messages)


def test_formats_are_told_from_templates() -> None:
    formats = [ToolPrompts(ChatTemplate(source, {})).format for source in (CHATML, GEMMA, QWEN, LLAMA3)]
    assert formats == [GENERIC, GENERIC, HERMES, LLAMA]
