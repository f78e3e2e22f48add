"""Chat templates against transformers' own renderer; refusals (case c06) and tools (case c08d)."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from quantd.daemon.templates import ChatTemplate
from quantd.engine.errors import RequestError
from quantd.quant.errors import CheckpointError

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# In the manner of the families' own templates, each with what is peculiar to it.
CHATML = """{% for message in messages %}
{%- if loop.first and messages[0]['role'] != 'system' %}<|im_start|>system
You help.<|im_end|>
{% endif %}
{{- '<|im_start|>' + message['role'] + '\n' }}
{%- generation %}{{ message['content'] }}{% endgeneration %}
{{- '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday Date: " + date_string + "\n\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\n\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}" }}
    {%- elif message.role == "tool" or message.role == "ipython" %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- endif %}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

MISTRAL = """{{ bos_token }}{% set ns = namespace(n=0) %}{% for message in messages %}
    {%- if (message['role'] == 'user') != (ns.n % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set ns.n = ns.n + 1 %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'] + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] + eos_token }}
        {%- if not message['content'] %}{% continue %}{% endif %}
    {%- endif %}
{%- endfor %}"""

GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
<start_of_turn>{{ role }}
{{ message['content'] | trim }}<end_of_turn>
{% endfor %}
{%- if add_generation_prompt %}<start_of_turn>model
{% endif %}"""

TALK = [
    {"role": "user", "content": "  What is <b>this</b>?\n"},
    {"role": "assistant", "content": 'A "tag" & more.'},
    {"role": "user", "content": "Danke, und ça?"},
]
WITH_SYSTEM = [{"role": "system", "content": "Be brief. "}, *TALK]
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "<é>", "parameters": {"a": [1, None]}}}
]
CALLS = [
    {"role": "user", "content": "Read gauge 4."},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "read_gauge", "arguments": {"n": 4}}}],
    },
    {"role": "tool", "content": "12.5 bar"},
]


@pytest.mark.parametrize(
    ("source", "messages", "tools"),
    [
        (CHATML, TALK, None),
        (CHATML, WITH_SYSTEM, None),
        (LLAMA3, TALK, None),
        (LLAMA3, WITH_SYSTEM, TOOLS),
        (LLAMA3, CALLS, TOOLS),
        (MISTRAL, TALK, None),
        (GEMMA, TALK, None),
    ],
    ids=["chatml", "chatml-system", "llama3", "llama3-tools", "llama3-calls", "mistral", "gemma"],
)
def test_renders_as_transformers(source, messages, tools) -> None:
    expected, _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=source, add_generation_prompt=True, **SPECIAL
    )
    assert ChatTemplate(source, SPECIAL).render(messages, tools) == expected[0]


def test_variables_and_documents_reach_the_template() -> None:
    source = "{{ enable_thinking }} {{ documents[0].text }} {{ strftime_now('%Y')|length }}{{ x is defined }}"
    text = ChatTemplate(source, {}).render(TALK, None, [{"text": "doc"}], {"enable_thinking": False})
    assert text == "False doc 4False"


@pytest.mark.parametrize(
    ("source", "messages", "reason"),
    [
        (GEMMA, WITH_SYSTEM, "System role not supported"),
        (MISTRAL, [TALK[0], TALK[0]], "must alternate"),
        ("{{ messages[0].content + 1 }}", TALK, "TypeError"),
        ("{{ messages[9].content.x }}", TALK, "no element 9"),
        ("{{ ''.__class__.__mro__ }}", TALK, "unsafe"),
        ("{{ messages.append(1) }}", TALK, "append"),
    ],
)
def test_refusals_carry_the_templates_reason(source, messages, reason) -> None:
    with pytest.raises(RequestError, match=reason):
        ChatTemplate(source, SPECIAL).render(messages)


def test_a_broken_template_is_the_checkpoints_fault() -> None:
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% for %}", {})
