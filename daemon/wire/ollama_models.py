"""Ollama's lists of models and what it shows of one (ollama/ollama, api/types.go, server/routes.go).

Clients rely on: a tag in every name; details.family being general.architecture; <family>.context_length
being what a request may have; `.Suffix` in the template of models that can infill; num_ctx and stop among
the parameters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

from quantd.daemon.derive import parent_of
from quantd.daemon.loaded_model import LoadedModel
from quantd.daemon.model_card import ModelCard, Tensor
from quantd.daemon.preset import Preset
from quantd.daemon.store import full_name
from quantd.daemon.wire.ollama import local_time

# Names of parameters that differ from those of SamplingParams.
PARAMETER_NAMES = {"repetition_penalty": "repeat_penalty"}

# keys of model_info below the architecture, and where config.json has them.
_INFO_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_DENSE = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}


def list_entry(card: ModelCard) -> dict[str, Any]:
    """One of /api/tags."""
    return {
        **_identity(card),
        "modified_at": local_time(card.stored.created),
        "size": card.stored.bytes,
        "capabilities": capabilities(card),
    }


def running_entry(
    card: ModelCard, model: LoadedModel, context_len: int | None, expires_at: float
) -> dict[str, Any]:
    """One of /api/ps. expires_at: Unix time in seconds."""
    info = model.engine.info
    size = info.weight_bytes + info.kv_bytes
    return {
        **_identity(card),
        "size": size,
        "size_vram": size if info.on_gpu else 0,
        "expires_at": local_time(expires_at),
        "context_length": context_len,
    }


def _identity(card: ModelCard) -> dict[str, Any]:
    name = full_name(card.stored.name)
    return {"name": name, "model": name, "digest": card.digest, "details": details(card)}


def details(card: ModelCard) -> dict[str, Any]:
    """Format, family, size and quantization. parent_model: what a model was made from."""
    family = card.stored.architecture
    parent = parent_of(card.stored.source)
    is_gguf = card.stored.description.startswith("gguf")
    return {
        "parent_model": full_name(parent) if parent else "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _count(card.num_parameters),
        "quantization_level": _quantization(card.stored.description),
    }


def _quantization(description: str) -> str:
    """Of "gguf Q4_1" the type, of "bf16 weights" BF16, of others all that is known."""
    first, _, rest = description.partition(" ")
    if first == "gguf":
        return rest or "unknown"
    return _DENSE.get(first, description) if rest == "weights" else description


def _count(number: int) -> str:
    """As Ollama writes counts: 134.5M, 1.2B."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return str(number) if number else ""


def capabilities(card: ModelCard) -> list[str]:
    """What clients offer the model for."""
    if card.embeds:
        return ["embedding"]
    can = card.capabilities
    named = {"tools": can.tools, "insert": can.infill is not None, "thinking": can.thinking}
    return ["completion", *(name for name, is_so in named.items() if is_so)]


def show_object(
    card: ModelCard, name: str, context_len: int | None, tensors: Sequence[Tensor] = ()
) -> dict[str, Any]:
    """All of /api/show. name: as the request has it."""
    named = _parameters(card, context_len)
    parameters = [f"{key:<30} {json.dumps(value, ensure_ascii=False)}" for key, value in named]
    template = _template(card)
    return {
        "license": card.preset.license,
        "modelfile": _modelfile(card, parameters, template),
        "parameters": "\n".join(parameters),
        "template": template,
        "system": card.preset.system,
        "messages": card.preset.messages,
        "details": details(card),
        "model_info": _model_info(card, name, context_len),
        "tensors": [tensor._asdict() for tensor in tensors],
        "capabilities": capabilities(card),
        "modified_at": local_time(card.stored.created),
    }


def _model_info(card: ModelCard, name: str, context_len: int | None) -> dict[str, Any]:
    family = card.stored.architecture
    sizes = {f"{family}.{key}": card.number(field) for key, field in _INFO_KEYS.items()}
    known = {
        "general.architecture": family,
        "general.basename": name,
        "general.parameter_count": card.num_parameters,
        f"{family}.context_length": context_len,
        **sizes,
    }
    return {key: value for key, value in known.items() if value is not None}


def _parameters(card: ModelCard, context_len: int | None) -> Iterator[tuple[str, object]]:
    if context_len is not None:
        yield "num_ctx", context_len
    yield from preset_parameters(card.preset).items()
    for stop in card.preset.stop or card.ends:
        yield "stop", stop


def preset_parameters(preset: Preset) -> dict[str, object]:
    """Ollama's parameters for a model's own sampling and limit."""
    parameters: dict[str, object] = {
        PARAMETER_NAMES.get(key, key): value for key, value in preset.sampling.items()
    }
    return parameters | ({} if preset.max_tokens is None else {"num_predict": preset.max_tokens})


def _template(card: ModelCard) -> str:
    """The model's Jinja. Clients look for Ollama's `.Suffix` in it to learn that a model can infill."""
    mark = "{#- .Suffix: this model fills in the middle -#}\n" if card.capabilities.infill is not None else ""
    return mark + (card.template or "{{ .Prompt }}")


def _modelfile(card: ModelCard, parameters: Sequence[str], template: str) -> str:
    lines = [
        '# Modelfile generated by "ollama show"',
        f"FROM {full_name(card.stored.name)}",
        f'TEMPLATE """{template}"""',
        *(["SYSTEM " + f'"""{card.preset.system}"""'] if card.preset.system else []),
        *(re.sub(r"^(\S+)\s+", r"PARAMETER \1 ", line) for line in parameters),
    ]
    return "\n".join(lines) + "\n"
