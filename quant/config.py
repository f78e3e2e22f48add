"""What a checkpoint says of its own quantization: bits, groups and format, never which modules are quantized.

That last is decided from the tensors present, since these records are known to be incomplete. Torch-free.
Where records lie: GPTQModel quantization/config.py, transformers utils/quantization_config.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from quantd.quant.config_compressed_tensors import CompressedTensorsConfig, parse_compressed_tensors
from quantd.quant.config_gptq import AWQConfig, GPTQConfig, parse_auto_round, parse_awq, parse_gptq
from quantd.quant.errors import CheckpointError, UnsupportedModelError
from quantd.quant.safetensors_file import read_json


class BitsAndBytesConfig(msgspec.Struct, frozen=True):
    """LLM.int8() weights; the outlier threshold concerns INT8 activations only and is not used."""

    @property
    def description(self) -> str:
        """For people."""
        return "bitsandbytes 8-bit"


QuantConfig = GPTQConfig | AWQConfig | CompressedTensorsConfig | BitsAndBytesConfig


def read_quant_config(folder: Path, config: Mapping[str, Any]) -> QuantConfig | None:
    """What the model in `folder` with config.json `config` says of its quantization; None if nothing.

    Raises CheckpointError for a record that contradicts itself and UnsupportedModelError for a method,
    format or option that quantd does not have.
    """
    records = _records(folder, config)
    if not records:
        return None
    source, raw = next(iter(records.items()))
    # A record beside config.json may leave the method to the one inside it.
    method = next(filter(None, map(_method, records.values())), None) or _guess_method(raw)
    parse = _METHODS.get(method)
    if parse is None:
        known = ", ".join(dict.fromkeys(_METHODS))
        raise UnsupportedModelError(
            f"{source}: quantization method {method!r} is not supported (known: {known})"
        )
    return parse(raw, source)


def _records(folder: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The records by where they were found, the one that counts first."""
    names = ("quantize_config.json", "quant_config.json")
    records = {name: read_json(folder / name) for name in names if (folder / name).is_file()}
    embedded = config.get("quantization_config") or config.get("compression_config")
    if embedded is not None:
        if not isinstance(embedded, dict):
            raise CheckpointError(
                f"config.json: quantization_config is {type(embedded).__name__}, not an object"
            )
        records["config.json quantization_config"] = embedded
    return records


def _method(raw: Mapping[str, Any]) -> str | None:
    method = raw.get("quant_method", raw.get("method"))
    return str(method).lower() if method else None


def _guess_method(raw: Mapping[str, Any]) -> str:
    """Old AutoAWQ and AutoGPTQ files do not name their method."""
    if "zero_point" in raw or str(raw.get("version", "")).lower().startswith("gem"):
        return "awq"
    return "bitsandbytes" if "load_in_8bit" in raw else "gptq"


def _parse_bitsandbytes(raw: Mapping[str, Any], source: str) -> BitsAndBytesConfig:
    if raw.get("load_in_4bit") or raw.get("_load_in_4bit"):
        kind = raw.get("bnb_4bit_quant_type", "fp4")
        raise UnsupportedModelError(f"{source}: bitsandbytes 4-bit ({kind}) is not supported (known: INT8)")
    return BitsAndBytesConfig()


_METHODS: Mapping[str, Callable[[Mapping[str, Any], str], QuantConfig]] = {
    "gptq": parse_gptq,
    "awq": parse_awq,
    "compressed-tensors": parse_compressed_tensors,
    "bitsandbytes": _parse_bitsandbytes,
    "auto-round": parse_auto_round,
    "auto_round": parse_auto_round,
    "intel/auto-round": parse_auto_round,
}
