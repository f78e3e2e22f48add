"""What Ollama's endpoints answer, as types (ollama/ollama, api/types.go)."""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict


class ErrorLine(TypedDict):
    error: str


class LikelyToken(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(LikelyToken):
    top_logprobs: list[LikelyToken]


class CallFunction(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class Call(TypedDict):
    id: str
    function: CallFunction


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class _Answer(TypedDict):
    """What the last line of an answer tells, and a whole one; lines before it say done: false. In ns."""

    model: str
    created_at: str
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load", "unload"]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    cached_prompt_tokens: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]
    logprobs: NotRequired[list[ScoredToken]]
    context: NotRequired[list[int]]


class ChatAnswer(_Answer):
    message: ChatMessage


class GenerateAnswer(_Answer):
    response: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class EmbedAnswer(TypedDict):
    model: str
    embeddings: list[list[float]]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]


class EmbeddingsAnswer(TypedDict):
    embedding: list[float]


class ModelDetails(TypedDict):
    parent_model: str
    format: Literal["gguf", "safetensors"]
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class _Named(TypedDict):
    name: str
    model: str
    digest: str
    details: ModelDetails


class StoredModelEntry(_Named):
    modified_at: str
    size: int
    capabilities: list[str]


class ModelTags(TypedDict):
    models: list[StoredModelEntry]


class RunningModelEntry(_Named):
    size: int
    size_vram: int
    expires_at: str
    context_length: int | None


class RunningModels(TypedDict):
    models: list[RunningModelEntry]


class TensorEntry(TypedDict):
    name: str
    type: str
    shape: list[int]


class ShownModel(TypedDict):
    license: str
    modelfile: str
    parameters: str
    template: str
    system: str
    messages: list[dict[str, Any]]
    details: ModelDetails
    model_info: dict[str, str | int]
    tensors: list[TensorEntry]
    capabilities: list[str]
    modified_at: str


class ApiVersion(TypedDict):
    version: str


class Cloud(TypedDict):
    disabled: bool
    source: str


class ApiStatus(TypedDict):
    cloud: Cloud


class ProgressLine(TypedDict):
    """A step of a pull or of a model that is made; `success` is the last."""

    status: str
    digest: NotRequired[str]
    total: NotRequired[int]
    completed: NotRequired[int]
