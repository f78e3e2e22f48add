"""What llama-server's endpoints answer, as types (llama.cpp, tools/server/README.md)."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict

from quantd.daemon.wire.timings import Timings


class LlamaError(TypedDict):
    code: int
    message: str
    type: str
    n_prompt_tokens: NotRequired[int]
    n_ctx: NotRequired[int]


class LlamaErrorBody(TypedDict):
    error: LlamaError


class TokenObject(TypedDict):
    id: int
    token: str
    bytes: list[int]
    logprob: float


class ScoredObject(TokenObject):
    top_logprobs: list[TokenObject]


class Progress(TypedDict):
    total: int
    cache: int
    processed: int
    time_ms: float


class CompletionAnswer(TypedDict, total=False):
    """Of these, those that the request's response_fields name; in a stream content comes in chunks first."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[ScoredObject]


class CompletionPart(TypedDict):
    index: int
    content: str
    tokens: list[int]
    stop: Literal[False]
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    timings: NotRequired[Timings]
    prompt_progress: NotRequired[Progress]
    completion_probabilities: NotRequired[list[ScoredObject]]


class Tokens(TypedDict):
    tokens: list[Any]


class Content(TypedDict):
    content: str


class Prompt(TypedDict):
    prompt: str


class EmbeddingEntry(TypedDict):
    index: int
    embedding: list[list[float]]


class LoraAdapter(TypedDict):
    id: int
    path: str
    scale: float


class Health(TypedDict):
    status: Literal["ok"]


class Slot(TypedDict):
    id: int
    n_ctx: int
    speculative: bool
    is_processing: bool
    params: dict[str, Any]


class TemplateCaps(TypedDict):
    supports_tools: bool
    supports_tool_calls: bool


class Modalities(TypedDict):
    vision: bool
    audio: bool


class Props(TypedDict):
    default_generation_settings: Slot
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    chat_template_caps: TemplateCaps
    modalities: Modalities
    build_info: str
    is_sleeping: bool


class SlotTimings(TypedDict, total=False):
    save_ms: float
    restore_ms: float


class SlotAction(TypedDict):
    """By what was done: saved, restored or erased."""

    id_slot: int
    filename: NotRequired[str]
    n_saved: NotRequired[int]
    n_written: NotRequired[int]
    n_restored: NotRequired[int]
    n_read: NotRequired[int]
    n_erased: NotRequired[int]
    timings: NotRequired[SlotTimings]
