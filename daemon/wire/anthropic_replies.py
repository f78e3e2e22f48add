"""What Anthropic's endpoints answer, as types (Anthropic API reference, version 2023-06-01)."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class ErrorDetails(TypedDict):
    error_code: str


class Error(TypedDict):
    type: str
    message: str
    details: NotRequired[ErrorDetails]


class ErrorObject(TypedDict):
    """An error as a body, or without a request_id as an event."""

    type: Literal["error"]
    error: Error
    request_id: NotRequired[str]


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ContentBlock(TypedDict):
    """By type: text; thinking and signature; or id, name and input."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


StopReason = Literal["end_turn", "max_tokens", "tool_use", "stop_sequence"]


class MessageObject(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class Ping(TypedDict):
    type: Literal["ping"]


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: MessageObject


class BlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: ContentBlock


class BlockPart(TypedDict):
    """By type, the field with its text."""

    type: Literal["text_delta", "thinking_delta", "signature_delta", "input_json_delta"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    partial_json: NotRequired[str]


class BlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: BlockPart


class BlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageEnding(TypedDict):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageEnd(TypedDict):
    type: Literal["message_delta"]
    delta: MessageEnding
    usage: MessageUsage


class MessageStop(TypedDict):
    type: Literal["message_stop"]


MESSAGE_EVENTS = (Ping, MessageStart, BlockStart, BlockDelta, BlockStop, MessageEnd, MessageStop)


class TokenCount(TypedDict):
    input_tokens: int


class ListedModel(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int | None
    max_tokens: int | None


class ModelPage(TypedDict):
    data: list[ListedModel]
    has_more: bool
    first_id: str | None
    last_id: str | None
