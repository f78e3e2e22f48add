"""What a recorder reads and writes of each wire format: the text of an event, tools, calls and their results.

Sources: the API references of OpenAI (chat/completions, responses) and Anthropic (messages).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from msgspec import convert

from quantd.daemon.wire.responses_tools import ToolBody, functions

Json = Mapping[str, Any]


class Dialect(Protocol):
    """One format. Events are the objects of a stream, or a whole reply as one."""

    name: str
    path: str

    def force(self, tool: str) -> Any:
        """A `tool_choice` that names a tool."""

    def tools(self, body: Json) -> set[str]:
        """The names of the tools that a request offers."""

    def text(self, event: Json) -> str:
        """What an event adds to the answer."""

    def calls(self, events: Iterable[Json]) -> set[str]:
        """The ids of the calls in an answer."""

    def results(self, body: Json) -> set[str]:
        """The ids of the calls whose results a request brings."""


class Chat:
    """OpenAI's chat/completions."""

    name = "chat/completions"
    path = "/chat/completions"

    def force(self, tool: str) -> Any:
        return {"type": "function", "function": {"name": tool}}

    def tools(self, body: Json) -> set[str]:
        return {tool["function"]["name"] for tool in body.get("tools") or () if "function" in tool}

    def text(self, event: Json) -> str:
        return "".join(part.get("content") or "" for part in self._parts(event))

    def calls(self, events: Iterable[Json]) -> set[str]:
        parts = (part for event in events for part in self._parts(event))
        return {call["id"] for part in parts for call in part.get("tool_calls") or () if call.get("id")}

    def results(self, body: Json) -> set[str]:
        return {message["tool_call_id"] for message in body["messages"] if message["role"] == "tool"}

    def _parts(self, event: Json) -> Iterator[Json]:
        for choice in event.get("choices") or ():
            yield choice.get("delta") or choice.get("message") or {}


class Fim(Chat):
    """Mistral's fim/completions, which answers like OpenAI's chats and has no tools."""

    name = "fim/completions"
    path = "/fim/completions"

    def tools(self, body: Json) -> set[str]:
        return set()

    def results(self, body: Json) -> set[str]:
        return set()


class Messages:
    """Anthropic's messages."""

    name = "messages"
    path = "/messages"

    def force(self, tool: str) -> Any:
        return {"type": "tool", "name": tool}

    def tools(self, body: Json) -> set[str]:
        return {tool["name"] for tool in body.get("tools") or ()}

    def text(self, event: Json) -> str:
        return str(event.get("delta", {}).get("text", "")) if event["type"] == "content_block_delta" else ""

    def calls(self, events: Iterable[Json]) -> set[str]:
        starts = [event["content_block"] for event in events if event["type"] == "content_block_start"]
        return {block["id"] for block in starts if block["type"] == "tool_use"}

    def results(self, body: Json) -> set[str]:
        contents = [message["content"] for message in body["messages"]]
        blocks = [block for content in contents if isinstance(content, list) for block in content]
        return {block["tool_use_id"] for block in blocks if block["type"] == "tool_result"}


class Responses:
    """OpenAI's responses."""

    name = "responses"
    path = "/responses"

    def force(self, tool: str) -> Any:
        return {"type": "function", "name": tool}

    def tools(self, body: Json) -> set[str]:
        return {
            function.flat_name for function in functions(convert(body.get("tools") or [], list[ToolBody]))
        }

    def text(self, event: Json) -> str:
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""

    def calls(self, events: Iterable[Json]) -> set[str]:
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        return {item["call_id"] for item in items if item["type"] == "function_call"}

    def results(self, body: Json) -> set[str]:
        items = body["input"] if isinstance(body["input"], list) else []
        return {item["call_id"] for item in items if item.get("type") == "function_call_output"}


DIALECTS: tuple[Dialect, ...] = (Chat(), Fim(), Messages(), Responses())


def dialect_of(path: str) -> Dialect | None:
    """The format of the answers at a path, if any are generated there."""
    path = path.rstrip("/")
    return next((dialect for dialect in DIALECTS if path.endswith(dialect.path)), None)
