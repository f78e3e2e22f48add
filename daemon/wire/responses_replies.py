"""What OpenAI's Responses answer, as types (OpenAI API reference, responses)."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from quantd.daemon.wire.openai_replies import ScoredEntry


class TextPart(TypedDict):
    """annotations, logprobs: of output_text."""

    type: Literal["output_text", "reasoning_text", "summary_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[ScoredEntry]]


class OutputItem(TypedDict):
    """By type: role and content; summary, content and encrypted_content; or call_id, name and arguments.

    namespace: of a call of a function that is in one.
    """

    id: str
    type: Literal["message", "reasoning", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[TextPart]]
    summary: NotRequired[list[TextPart]]
    encrypted_content: NotRequired[None]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseObject(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    service_tier: str
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage | None


class _Event(TypedDict):
    sequence_number: int


class ResponseEvent(_Event):
    """The response in a new state, or the same, which is a sign of life."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(_Event):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _PlaceEvent(_Event):
    item_id: str
    output_index: int


class PartEvent(_PlaceEvent):
    type: Literal[
        "response.content_part.added",
        "response.content_part.done",
        "response.reasoning_summary_part.added",
        "response.reasoning_summary_part.done",
    ]
    content_index: NotRequired[int]
    summary_index: NotRequired[int]
    part: TextPart


class TextDeltaEvent(_PlaceEvent):
    type: Literal[
        "response.output_text.delta",
        "response.reasoning_text.delta",
        "response.reasoning_summary_text.delta",
    ]
    content_index: NotRequired[int]
    summary_index: NotRequired[int]
    delta: str
    logprobs: NotRequired[list[ScoredEntry]]


class TextDoneEvent(_PlaceEvent):
    type: Literal[
        "response.output_text.done",
        "response.reasoning_text.done",
        "response.reasoning_summary_text.done",
    ]
    content_index: NotRequired[int]
    summary_index: NotRequired[int]
    text: str
    logprobs: NotRequired[list[ScoredEntry]]


class ArgumentsDeltaEvent(_PlaceEvent):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDoneEvent(_PlaceEvent):
    type: Literal["response.function_call_arguments.done"]
    arguments: str


RESPONSE_EVENTS = (
    ResponseEvent,
    ItemEvent,
    PartEvent,
    TextDeltaEvent,
    TextDoneEvent,
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
)


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
