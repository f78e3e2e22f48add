"""The quantization records of GPTQ (AutoGPTQ, GPTQModel), AWQ (AutoAWQ) and AutoRound. Torch-free.

Sources: AutoGPTQ quantization/config.py, GPTQModel quantization/config.py, AutoAWQ models/_config.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from quantd.quant.config_fields import BITS, check_bits, check_pattern, convert
from quantd.quant.errors import CheckpointError, UnsupportedModelError


class GPTQSettings(msgspec.Struct, frozen=True):
    """How one module is packed. group_size: inputs a group, -1 for one group over all of them."""

    bits: int
    group_size: int
    sym: bool
    desc_act: bool


class GPTQRule(msgspec.Struct, frozen=True):
    """A row of GPTQModel's `dynamic`: settings of modules whose name `pattern` matches from its start."""

    pattern: str
    overrides: dict[str, Any]


class GPTQConfig(msgspec.Struct, frozen=True):
    """zero_version: 1 where files store zero points minus one, 2 where they store them as they are."""

    base: GPTQSettings
    zero_version: Literal[1, 2]
    static_groups: bool = False
    rules: tuple[GPTQRule, ...] = ()

    def settings(self, module: str) -> GPTQSettings:
        """Of one module, by its name in the checkpoint; the first matching rule wins."""
        for rule in self.rules:
            if re.match(rule.pattern, module):
                return convert(msgspec.structs.asdict(self.base) | rule.overrides, GPTQSettings, rule.pattern)
        return self.base

    @property
    def description(self) -> str:
        """For people: "gptq 4-bit g32 act-order"."""
        base = self.base
        words = ["gptq", f"{base.bits}-bit", f"g{base.group_size}"]
        words += ["act-order"] if base.desc_act and not self.static_groups else []
        words += ["per-module rules"] if self.rules else []
        return " ".join(words)


class AWQConfig(msgspec.Struct, frozen=True):
    """AutoAWQ's "gemm" packing."""

    bits: int
    group_size: int

    @property
    def description(self) -> str:
        """For people: "awq 4-bit g128"."""
        return f"awq {self.bits}-bit g{self.group_size}"


_SYNONYMS = {"w_bit": "bits", "wbits": "bits", "q_group_size": "group_size", "checkpoint_format": "format"}


class _RawGPTQ(msgspec.Struct):
    """The spelling that GPTQ and AWQ files share, once synonyms are resolved."""

    bits: int
    group_size: int | None
    sym: bool | None = None
    desc_act: bool | None = None
    format: str | None = None
    static_groups: bool | None = None
    pack_dtype: str | None = None
    dynamic: dict[str, dict[str, Any] | bool | None] | None = None
    meta: dict[str, Any] | None = None
    is_marlin_format: bool = False
    rotation: str | None = None
    packing_format: str | None = None
    backend: str | None = None
    extra_config: dict[str, dict[str, Any]] | None = None


def _raw_gptq(raw: Mapping[str, Any], source: str) -> _RawGPTQ:
    fields = {_SYNONYMS.get(key, key): value for key, value in raw.items()}
    fields.setdefault("format", raw.get("version"))
    if "zero_point" in raw:
        fields.setdefault("sym", not raw["zero_point"])
    parsed = convert(fields, _RawGPTQ, source)
    if parsed.group_size is not None and (parsed.group_size == 0 or parsed.group_size < -1):
        raise CheckpointError(f"{source}: group_size {parsed.group_size}: expected -1 or a positive number")
    return parsed


def parse_gptq(raw: Mapping[str, Any], source: str) -> GPTQConfig:
    parsed = _raw_gptq(raw, source)
    layout = "marlin" if parsed.is_marlin_format else (parsed.format or "gptq").lower()
    if layout not in _GPTQ_ZEROS or (layout == "gptq_p" and parsed.bits == 3):
        raise UnsupportedModelError(
            f"{source}: GPTQ format {layout!r} is not supported (known: gptq, gptq_v2)"
        )
    for option, value in (("pack_dtype", parsed.pack_dtype), ("rotation", parsed.rotation)):
        if value not in (None, "int32"):
            raise UnsupportedModelError(f"{source}: {option} {value!r} is not supported")
    check_bits(parsed.bits, BITS, source)
    return GPTQConfig(
        GPTQSettings(parsed.bits, parsed.group_size or -1, parsed.sym is not False, bool(parsed.desc_act)),
        _GPTQ_ZEROS[layout],
        bool(parsed.static_groups or (parsed.meta or {}).get("static_groups")),
        _gptq_rules(parsed, source),
    )


# Planar GPTQ ("gptq_p") is v2 bit for bit at widths that divide 32.
_GPTQ_ZEROS: Mapping[str, Literal[1, 2]] = {"gptq": 1, "gptq_v2": 2, "gptq_p": 2}


def _gptq_rules(parsed: _RawGPTQ, source: str) -> tuple[GPTQRule, ...]:
    """`-:` rows mean "not quantized", which the tensors say themselves, but they still stop the search."""
    rules = []
    for key, value in (parsed.dynamic or {}).items():
        skip = key.startswith("-:") or not isinstance(value, dict)
        pattern = check_pattern(key.removeprefix("-:").removeprefix("+:"), source)
        rules.append(GPTQRule(pattern, {} if skip else _overrides(value, f"{source} dynamic {key!r}")))
    return tuple(rules)


class _Overrides(msgspec.Struct, omit_defaults=True):
    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None


def _overrides(value: Any, source: str) -> dict[str, Any]:
    parsed = convert(value, _Overrides, source)
    if parsed.bits is not None:
        check_bits(parsed.bits, BITS, source)
    if parsed.group_size is not None and (parsed.group_size == 0 or parsed.group_size < -1):
        raise CheckpointError(f"{source}: group_size {parsed.group_size}: expected -1 or a positive number")
    return {key: item for key, item in msgspec.structs.asdict(parsed).items() if item is not None}


def parse_auto_round(raw: Mapping[str, Any], source: str) -> GPTQConfig | AWQConfig:
    """AutoRound writes GPTQ or AWQ tensors; `extra_config` holds settings by exact module name."""
    parsed = _raw_gptq(raw, source)
    layout = parsed.packing_format or parsed.backend or "auto_round:auto_gptq"
    plain = dict(raw) | {"format": None, "checkpoint_format": None, "version": None, "backend": None}
    if layout.endswith("awq"):
        return parse_awq(plain, source)
    if not layout.endswith("gptq"):
        raise UnsupportedModelError(f"{source}: AutoRound packing {layout!r} is not supported")
    extra = {name: row for name, row in (parsed.extra_config or {}).items() if row.get("bits", 4) in BITS}
    dynamic = {f"{re.escape(name)}$": row for name, row in extra.items()}
    return parse_gptq(plain | {"dynamic": dynamic}, source)


def parse_awq(raw: Mapping[str, Any], source: str) -> AWQConfig:
    parsed = _raw_gptq(raw, source)
    layout = (parsed.format or "gemm").lower()
    if layout != "gemm" or parsed.backend == "llm-awq":
        found = parsed.backend if layout == "gemm" else layout
        raise UnsupportedModelError(f"{source}: AWQ format {found!r} is not supported (known: gemm)")
    check_bits(parsed.bits, (4,), f"{source}: AWQ")
    return AWQConfig(parsed.bits, parsed.group_size or -1)
