"""The tool-call formats of model families, and how a chat template shows which is its own.

Sources: the families' chat templates, Mistral's mistral-common (versions 3, 11 and 13 of its tokenizer) and
Meta's model cards for Llama 3.1 to 3.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from quantd.daemon.tool_formats.format import ToolFormat
from quantd.daemon.tool_formats.json_calls import JsonCalls
from quantd.daemon.tool_formats.xml_calls import XmlCalls

_NAME = '{"name": "'
_ARGUMENTS = '", "arguments": '

HERMES = JsonCalls(
    trigger="<tool_call>",
    head="\n" + _NAME,
    between=_ARGUMENTS,
    after="}\n</tool_call>",
    again="\n<tool_call>",
)
"""Of Hermes, Qwen 2.5 and 3, SmolLM3 and Granite 4."""

GENERIC = replace(HERMES, parallel=False)
"""For models that were taught no format that is known here: one call at a time is enough for them."""

QWEN_CODER = XmlCalls(
    trigger="<tool_call>",
    head="\n<function=",
    head_end=">\n",
    parameter="<parameter=",
    key_end=">\n",
    value_end="\n</parameter>\n",
    after="</function>\n</tool_call>",
    again="\n<tool_call>",
)
SEED = XmlCalls(
    trigger="<seed:tool_call>",
    head="\n<function=",
    head_end=">\n",
    parameter="<parameter=",
    key_end=">",
    value_end="</parameter>\n",
    after="</function>\n</seed:tool_call>",
    again="\n<seed:tool_call>",
)
LLAMA = JsonCalls(
    trigger="<|python_tag|>",
    head=_NAME,
    between='", "parameters": ',
    after="}",
    again="; ",
    parallel=False,
    starts_bare=True,
)
MISTRAL_LIST = JsonCalls(
    trigger="[TOOL_CALLS]",
    opening="[",
    head=_NAME,
    between=_ARGUMENTS,
    after="}",
    again=", ",
    closing="]",
)
MISTRAL_SPACED_LIST = JsonCalls(
    trigger="[TOOL_CALLS]",
    opening=" [",
    head=_NAME,
    between=_ARGUMENTS,
    after="}",
    again=", ",
    closing="]",
)
MISTRAL = JsonCalls(trigger="[TOOL_CALLS]", head="", between="[ARGS]", after="", again="[TOOL_CALLS]")
MISTRAL_IDS = JsonCalls(
    trigger="[TOOL_CALLS]",
    head="",
    id_mark="[CALL_ID]",
    between="[ARGS]",
    after="",
    again="[TOOL_CALLS]",
)
DEEPSEEK = JsonCalls(
    trigger="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>",
    between="<｜tool▁sep｜>",
    after="<｜tool▁call▁end｜>",
    again="",
    closing="<｜tool▁calls▁end｜>",
)
DEEPSEEK_FENCED = JsonCalls(
    trigger="<｜tool▁calls▁begin｜>",
    head="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    between="\n```json\n",
    after="\n```<｜tool▁call▁end｜>",
    again="\n",
    closing="<｜tool▁calls▁end｜>",
)
GRANITE = JsonCalls(
    trigger="<|tool_call|>",
    opening="[",
    head=_NAME,
    between=_ARGUMENTS,
    after="}",
    again=", ",
    closing="]",
)
PHI = JsonCalls(
    trigger="<|tool_call|>",
    opening="[",
    head=_NAME,
    between=_ARGUMENTS,
    after="}",
    again=", ",
    closing="]<|/tool_call|>",
)
PHI_TAGS = JsonCalls(
    trigger="<|tool_call|>",
    head=_NAME,
    between=_ARGUMENTS,
    after="}<|/tool_call|>",
    again="<|tool_call|>",
)
NEMOTRON = JsonCalls(
    trigger="<TOOLCALL>",
    opening="[",
    head=_NAME,
    between=_ARGUMENTS,
    after="}",
    again=", ",
    closing="]</TOOLCALL>",
)

# The first whose texts are all in a template counts; of two alike the more particular comes first. None: a
# format that is not here.
_SIGNS: Sequence[tuple[ToolFormat | None, Sequence[str]]] = (
    (MISTRAL_IDS, ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL_SPACED_LIST, ("[TOOL_CALLS] [",)),
    (MISTRAL_LIST, ("[TOOL_CALLS]",)),
    (DEEPSEEK_FENCED, ("<｜tool▁calls▁begin｜>", "```json")),
    (DEEPSEEK, ("<｜tool▁calls▁begin｜>",)),
    (SEED, ("seed:tool_call", "<function=", "<parameter=")),
    (QWEN_CODER, ("<tool_call>", "<function=", "<parameter=")),
    (PHI_TAGS, ("<|tool_call|>{",)),
    (PHI, ("<|tool|>",)),
    (GRANITE, ("<|tool_call|>",)),
    (NEMOTRON, ("<TOOLCALL>",)),
    (None, ("<tool_call>", "<arg_key>")),
    (HERMES, ("<tool_call>", "arguments")),
    (LLAMA, ("<|start_header_id|>", '"parameters": ')),
)


def known_format(template: str) -> ToolFormat | None:
    """The format that a chat template teaches; None where it teaches none of these."""
    found = (format for format, signs in _SIGNS if all(sign in template for sign in signs))
    return next(found, None)
