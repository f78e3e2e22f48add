"""The quantization record of compressed-tensors (llm-compressor). Torch-free.

Source: compressed-tensors quantization/quant_config.py, quant_scheme.py and quant_args.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from quantd.quant.config_fields import BITS, check_bits, check_pattern, convert
from quantd.quant.errors import CheckpointError, UnsupportedModelError


class CompressedScheme(msgspec.Struct, frozen=True):
    """One config group of compressed-tensors: how the weights of its targets are stored.

    targets: class names, module names or "re:" patterns. group_size: None unless the strategy is "group".
    ordered: weights come with a g_idx. input_bits: see QuantizedWeight.
    """

    targets: tuple[str, ...]
    bits: int
    strategy: Literal["tensor", "channel", "group"]
    symmetric: bool
    group_size: int | None = None
    ordered: bool = False
    input_bits: int | None = None

    def specificity(self, module: str) -> int:
        """How closely the targets name a Linear `module`: 3 by name, 2 by pattern, 1 by class, 0 not."""
        if module in self.targets:
            return 3
        if any(t.startswith("re:") and re.match(t[3:], module) for t in self.targets):
            return 2
        return int("Linear" in self.targets)


class CompressedTensorsConfig(msgspec.Struct, frozen=True):
    """The config groups of a compressed-tensors checkpoint."""

    schemes: tuple[CompressedScheme, ...]

    def scheme(self, module: str) -> CompressedScheme | None:
        """The scheme whose targets name `module` most closely."""
        best = max(self.schemes, key=lambda scheme: scheme.specificity(module))
        return best if best.specificity(module) else None

    @property
    def description(self) -> str:
        """For people: "compressed-tensors W4A16 g128"."""
        return " + ".join(dict.fromkeys(map(_scheme_words, self.schemes)))


class _RawArgs(msgspec.Struct):
    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    actorder: str | bool | None = None
    dynamic: bool | str = False


class _RawScheme(msgspec.Struct):
    targets: tuple[str, ...]
    weights: _RawArgs | None = None
    input_activations: _RawArgs | None = None
    output_activations: _RawArgs | None = None
    format: str | None = None


class _RawCompressed(msgspec.Struct):
    config_groups: dict[str, _RawScheme | list[str]]
    format: str | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None


_COMPRESSED_FORMATS = ("int-quantized", "naive-quantized", "pack-quantized")


def parse_compressed_tensors(raw: Mapping[str, Any], source: str) -> CompressedTensorsConfig:
    parsed = convert(raw, _RawCompressed, source)
    sparsity = (parsed.sparsity_config or {}).get("format", "dense")
    if sparsity != "dense":
        raise UnsupportedModelError(f"{source}: sparsity format {sparsity!r} is not supported")
    if (parsed.transform_config or {}).get("config_groups"):
        raise UnsupportedModelError(f"{source}: transform_config (rotations at run time) is not supported")
    schemes = []
    for name, group in parsed.config_groups.items():
        if not isinstance(group, _RawScheme):
            raise UnsupportedModelError(
                f"{source}: config group {name} = {group} is a preset name, not a scheme"
            )
        if group.weights is not None:
            schemes.append(_scheme(group, group.format or parsed.format, f"{source} {name}"))
    if not schemes:
        raise CheckpointError(f"{source}: config_groups quantizes no weights")
    return CompressedTensorsConfig(tuple(schemes))


def _scheme(group: _RawScheme, layout: str | None, source: str) -> CompressedScheme:
    weights = group.weights
    assert weights is not None
    if layout not in (*_COMPRESSED_FORMATS, None):
        known = ", ".join(_COMPRESSED_FORMATS)
        raise UnsupportedModelError(f"{source}: format {layout!r} is not supported (known: {known})")
    if weights.type != "int":
        raise UnsupportedModelError(
            f"{source}: {weights.num_bits}-bit {weights.type} weights are not supported"
        )
    check_bits(weights.num_bits, BITS, source)
    if group.output_activations is not None:
        raise UnsupportedModelError(f"{source}: quantized output activations are not supported")
    strategy = weights.strategy or ("group" if weights.group_size else "tensor")
    if strategy not in ("tensor", "channel", "group"):
        raise UnsupportedModelError(f"{source}: weight strategy {strategy!r} is not supported")
    if strategy == "group" and (weights.group_size is None or weights.group_size < 1):
        raise CheckpointError(f"{source}: group_size {weights.group_size}: expected a positive number")
    for target in group.targets:
        if target.startswith("re:"):
            check_pattern(target[3:], source)
    return CompressedScheme(
        group.targets,
        weights.num_bits,
        strategy,  # type: ignore[arg-type]  # one of the three, checked above
        weights.symmetric,
        weights.group_size if strategy == "group" else None,
        weights.actorder in ("group", "dynamic", True),
        _input_bits(group.input_activations, source),
    )


def _input_bits(inputs: _RawArgs | None, source: str) -> int | None:
    if inputs is None:
        return None
    if inputs.dynamic is not True:
        raise UnsupportedModelError(f"{source}: static input scales are not supported (dynamic ones are)")
    if inputs.type != "int" or inputs.num_bits != 8 or inputs.strategy not in (None, "token"):
        kind = f"{inputs.num_bits}-bit {inputs.type} per {inputs.strategy}"
        raise UnsupportedModelError(
            f"{source}: {kind} activations are not supported (known: 8-bit int per token)"
        )
    # quantd rounds inputs symmetrically; models for asymmetric inputs get exact ones, which serve as well.
    return 8 if inputs.symmetric else None


def _scheme_words(scheme: CompressedScheme) -> str:
    words = f"compressed-tensors W{scheme.bits}A{scheme.input_bits or 16}"
    words += f" g{scheme.group_size}" if scheme.group_size else f" per {scheme.strategy}"
    return words + (" act-order" if scheme.ordered else "")
