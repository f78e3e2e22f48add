"""How a chat template is told of tools, of calls that were made and of their results.

What a template takes itself it is given, in the form it wants: that is found out by rendering a small
conversation. For the rest texts of our own stand in the messages, so that nothing is left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from quantd.daemon.templates import ChatTemplate, Message
from quantd.daemon.tool_formats.families import GENERIC, known_format
from quantd.daemon.tool_formats.format import ToolFormat
from quantd.engine.errors import RequestError

_DESCRIPTION = """You may call functions. These are their names, purposes and JSON schemas:
<tools>
{tools}
</tools>

To call one, end the answer with the call, written like this:
{example}"""
_RESULT = "<tool_response>\n{content}\n</tool_response>"

_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "probe_name",
        "description": "probe",
        "parameters": {"type": "object", "properties": {"probe_key": {"type": "string", "description": "x"}}},
    },
}
_PROBE_QUESTION = {"role": "user", "content": "probe-question"}
_PROBE_CALL = {
    "id": "abcdef123",
    "type": "function",
    "function": {"name": "probe_name", "arguments": {"probe_key": "probe-value"}},
}
_PROBE_RESULT = {
    "role": "tool",
    "name": "probe_name",
    "tool_call_id": "abcdef123",
    "content": "probe-result",
}


@dataclass(frozen=True)
class _CallForm:
    """How a template wants a message with calls: arguments as text or object, no content as null or ''."""

    text_arguments: bool
    null_content: bool

    def apply(self, message: Message) -> Message:
        """The message in this form."""
        content = message["content"] or (None if self.null_content else "")
        calls = [self._call(call) for call in message["tool_calls"]]
        return message | {"content": content, "tool_calls": calls}

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        if self.text_arguments and not isinstance(function["arguments"], str):
            text = json.dumps(function["arguments"], ensure_ascii=False)
            return call | {"function": function | {"arguments": text}}
        return call


_CALL_FORMS = [_CallForm(text, null) for text, null in product((False, True), repeat=2)]


class ToolPrompts:
    """The way to tell one template.

    format: what the template teaches, or GENERIC where it teaches nothing that is known here; then tools,
    and with them calls and results, are told in words.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        known = known_format(template.source)
        self.format: ToolFormat = known or GENERIC
        self._known = known is not None
        self.short_ids = bool(re.search(r"length\s*!=\s*9", template.source))

    def place(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[Sequence[Message], Sequence[dict[str, Any]] | None]:
        """Messages and tools as the template can take them."""
        native = self._known or not tools
        if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
            messages = list(self._placed(messages, native))
        if not tools or (native and self._takes_tools):
            return messages, tools
        functions = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
        example = self.format.write([("NAME", {"ARGUMENT": "VALUE"})])
        return self._add_system(
            messages, _DESCRIPTION.format(tools="\n".join(functions), example=example)
        ), None

    def _placed(self, messages: Sequence[Message], native: bool) -> Iterable[Message]:
        """The messages; results that the template does not take go before what the user says next."""
        results: list[str] = []
        for message in messages:
            if message["role"] == "tool" and not (native and self._takes_results):
                results.append(_RESULT.format(content=message["content"]))
                continue
            if results and message["role"] == "user":
                message = message | {"content": "\n".join([*results, message["content"]])}
            elif results:
                yield {"role": "user", "content": "\n".join(results)}
            results = []
            message = self._with_short_ids(message) if self.short_ids else message
            yield self._placed_calls(message, native)
        if results:
            yield {"role": "user", "content": "\n".join(results)}

    def _placed_calls(self, message: Message, native: bool) -> Message:
        if not message.get("tool_calls"):
            return message
        if native and self._call_form is not None:
            return self._call_form.apply(message)
        functions = [call["function"] for call in message["tool_calls"]]
        text = self.format.write(
            [(function["name"], _object(function["arguments"])) for function in functions]
        )
        content = "\n".join(filter(None, [message["content"], text]))
        return {name: value for name, value in message.items() if name != "tool_calls"} | {"content": content}

    def _with_short_ids(self, message: Message) -> Message:
        """For templates that insist on ids of nine letters and digits."""
        if "tool_call_id" in message:
            message = message | {"tool_call_id": _short_id(message["tool_call_id"])}
        if message.get("tool_calls"):
            calls = [call | {"id": _short_id(call.get("id", ""))} for call in message["tool_calls"]]
            message = message | {"tool_calls": calls}
        return message

    def _add_system(self, messages: Sequence[Message], text: str) -> Sequence[Message]:
        """The text as, or after, the system message; before the first message of another if none is taken."""
        first, *others = messages
        if first["role"] == "system":
            return [first | {"content": f"{first['content']}\n\n{text}"}, *others]
        if self._takes_system:
            return [{"role": "system", "content": text}, *messages]
        return [first | {"content": f"{text}\n\n{first['content']}"}, *others]

    @cached_property
    def _takes_tools(self) -> bool:
        return self._shows([_PROBE_QUESTION], "probe_name", tools=[_PROBE_TOOL])

    @cached_property
    def _takes_results(self) -> bool:
        answer = {"role": "assistant", "content": "probe-answer"}
        return self._shows([_PROBE_QUESTION, answer, _PROBE_RESULT], "probe-result")

    @cached_property
    def _takes_system(self) -> bool:
        system = {"role": "system", "content": "probe-system"}
        return self._shows([system, _PROBE_QUESTION], "probe-system")

    @cached_property
    def _call_form(self) -> _CallForm | None:
        return next((form for form in _CALL_FORMS if self._takes_calls(form)), None)

    def _takes_calls(self, form: _CallForm) -> bool:
        """Whether calls in this form are shown, also beside a text."""
        messages = [
            form.apply({"role": "assistant", "content": content, "tool_calls": [_PROBE_CALL]})
            for content in ("", "probe-content")
        ]
        tools = [_PROBE_TOOL] if self._takes_tools else None
        return all(
            self._shows([_PROBE_QUESTION, message, _PROBE_RESULT], "probe_name", "probe-value", tools=tools)
            for message in messages
        )

    def _shows(
        self, messages: Sequence[Message], *texts: str, tools: Sequence[dict[str, Any]] | None = None
    ) -> bool:
        """Whether a prompt for these messages has these texts in it."""
        try:
            prompt = self._template.render(messages, tools)
        except RequestError:
            return False
        return all(text in prompt for text in texts)


def _short_id(id: str) -> str:
    """The id, or nine letters and digits that stand for it."""
    return id if _SHORT_ID.fullmatch(id) else hashlib.blake2b(id.encode(), digest_size=8).hexdigest()[:9]


def _object(arguments: Any) -> dict[str, Any]:
    """Arguments; a text that is no JSON object, as a call that was cut off may have left, in one."""
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}
