"""The small files beside a model's weights: JSON objects, and what they say of sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from quantd.engine.errors import RequestError
from quantd.engine.request import SamplingParams
from quantd.quant import safetensors_file
from quantd.quant.errors import CheckpointError

# For models that say nothing. Small quantized models ramble at temperature 1 with the whole vocabulary
# to draw from; llama-server and Ollama default to much the same.
USUAL_SAMPLING: dict[str, float] = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or {} where there is no such file. Raises CheckpointError for anything else."""
    return safetensors_file.read_json(file) if file.is_file() else {}


def model_sampling(folder: Path) -> dict[str, float]:
    """SamplingParams fields that generation_config.json gives; empty where it says nothing of sampling.

    Raises CheckpointError for values that no engine could honour.
    """
    file = folder / "generation_config.json"
    named = {key: value for key, value in read_json(file).items() if key in _SAMPLING_KEYS}
    given = {key: value for key, value in named.items() if value is not None}
    for key, value in given.items():
        kinds = (int,) if key == "top_k" else (int, float)
        if type(value) not in kinds:
            raise CheckpointError(f"{file}: {key} is {value!r}, which is no number for it")
    try:
        SamplingParams(**given).validate(vocab_size=1)
    except RequestError as error:
        raise CheckpointError(f"{file}: {error}") from error
    return given
