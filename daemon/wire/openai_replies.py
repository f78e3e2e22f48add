"""What OpenAI's endpoints answer, as types (OpenAI API reference; extras of vLLM and llama-server)."""

from __future__ import annotations

from typing import Literal, NotRequired, TypedDict

from quantd.daemon.content_end import Finish
from quantd.daemon.wire.timings import Timings


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class UsageObject(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenEntry(TypedDict):
    """A token as text and as bytes, with its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ScoredEntry(TokenEntry):
    top_logprobs: list[TokenEntry]


class ChatLogprobs(TypedDict):
    content: list[ScoredEntry]
    refusal: None


class FunctionObject(TypedDict):
    name: str
    arguments: str


class ToolCallObject(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionObject


class AssistantMessage(TypedDict):
    """reasoning, reasoning_content: the same, under both names that clients look for."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallObject]]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageObject
    timings: Timings


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDeltaObject(TypedDict):
    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class MessageDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCallDeltaObject]


class ChatChunkChoice(TypedDict):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageObject | None]
    timings: NotRequired[Timings]


class CompletionLogprobs(TypedDict):
    """Parallel lists; the first token of a prompt has null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageObject
    timings: Timings


class CompletionChunk(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageObject | None]
    timings: NotRequired[Timings]


class EmbeddingUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class EmbeddingObject(TypedDict):
    """embedding: numbers, or for base64 the text of little-endian floats."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(TypedDict):
    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: EmbeddingUsage


class ModelMeta(TypedDict):
    n_ctx: int | None
    n_ctx_train: int | None
    n_vocab: int
    n_embd: int
    size: int


class ModelObject(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: NotRequired[int]
    context_length: NotRequired[int]
    meta: ModelMeta | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelObject]
