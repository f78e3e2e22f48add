"""What models launch, taken down where Triton would compile it, on a machine without a GPU.

The ops run as in an engine, for a pretended GPU and on tensors of the meta device, which have sizes, types
and alignment but no memory. Triton itself finds what each launch is specialized to.

For a process of its own, in which Triton does not interpret.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from gpu_models import GPUS, META, MODELS, Model
from torch import Tensor

from quantd.engine.gpu_sampler import moved_inputs
from quantd.engine.memory import PROMPT_ROWS
from quantd.engine.models.decoder import Decoder
from quantd.kernels.gpu import attention as attention_module
from quantd.kernels.gpu import ops as ops_module
from quantd.kernels.gpu.kv_cache import copy_blocks
from quantd.kernels.gpu.sampling import sample
from quantd.kernels.gpu.sampling_inputs import Adjustment, Draw, SamplingInputs
from quantd.kernels.gpu.tuning import Gpu
from quantd.kernels.ops import AttentionInputs
from quantd.quant.kv import FORMATS, KVPool, KVShape

Values = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Launch:
    """A kernel as it is compiled for a launch. kernel: "module:name". capability: 89 for sm_89.

    signature: types of arguments by name; constants: values of the others. divisible: arguments known to be
    multiples of 16 (pointers: aligned to 16 bytes). max_registers: of a thread, None for as many as the
    assembler likes.
    """

    kernel: str
    capability: int
    signature: Values
    constants: Values
    divisible: tuple[str, ...]
    num_warps: int
    num_stages: int
    max_registers: int | None = None

    def __str__(self) -> str:
        told = [f"{name} {value}" for name, value in (*self.signature, *self.constants)]
        return (
            f"{self.kernel} on sm_{self.capability}, {self.num_warps} warps, {self.num_stages} stages: "
            f"{', '.join(told)}; by 16: {' '.join(self.divisible)}"
        )


# Tokens of each request of a step, and blocks of the longest.
STEPS: tuple[tuple[list[int], int], ...] = (
    ([1], 16),
    ([1], 512),
    ([1] * 2, 16),
    ([1] * 4, 16),
    ([1] * 16, 512),
    ([1] * 32, 512),
    ([1] * 64, 8192),
    ([20], 16),
    ([20], 512),
    ([100], 512),
    ([512], 512),
    ([496] + [1] * 16, 512),
)
# How rows are drawn, and whether under a grammar and with penalties.
DRAWS = (
    (Draw(0.0, 0, 0), True),
    (Draw(1.0, 0, 0), False),
    (Draw(1.0, 0, 0, top_k=40), True),
    (Draw(1.0, 0, 0, top_p=0.9), False),
    (Draw(1.0, 0, 0, top_k=40, top_p=0.9, min_p=0.05), True),
)


class Recorder:
    """Takes down what this process launches from now on, in place of Triton's driver and its compiler."""

    def __init__(self) -> None:
        import triton.compiler
        from triton.runtime import driver

        self.found: set[Launch] = set()
        self._gpu = GPUS[0]
        driver.set_active(self)
        triton.compiler.compile = self._compile
        attention_module.gpu_of = lambda device: self._gpu
        ops_module.pack = cache(ops_module.pack)

    def record(self, name: str) -> set[Launch]:
        """What a model launches on every GPU, but for what others launched before it."""
        self.found.clear()
        for self._gpu in GPUS:
            _serve(MODELS[name], self._gpu)
        return self.found

    def get_current_device(self) -> int:
        """See triton.backends.driver.DriverBase. Triton keeps what it has compiled by this number."""
        return self._gpu.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._gpu.capability, 32)

    def _compile(self, source: Any, target: Any, options: Mapping[str, Any], **_: object) -> _Compiled:
        self.found.add(_launch(source, target.arch, options))
        return _Compiled()


class _Compiled:
    """A kernel of which nothing runs."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None:
        pass

    def run(self, *_: object) -> None:
        pass


def _launch(source: Any, capability: int, options: Mapping[str, Any]) -> Launch:
    names = source.fn.arg_names
    constants = {names[at[0]]: value for at, value in source.constants.items()}
    signature = {name: type for name, type in source.signature.items() if name not in constants}
    return Launch(
        f"{source.fn.module}:{source.fn.__name__}",
        capability,
        tuple(sorted(signature.items())),
        tuple(sorted(constants.items())),
        tuple(names[at[0]] for at, value in source.attrs.items() if value),
        options["num_warps"],
        options["num_stages"],
        options.get("maxnreg"),
    )


def _serve(model: Model, gpu: Gpu) -> None:
    """Run steps of every size on all parts of a model, draw tokens in every way, and copy blocks."""
    for part in model.parts:
        for same_bits, format in ((False, model.kv[0]), *((True, format) for format in model.kv)):
            decoder = model.decoder(gpu, same_bits, part)
            pool = KVPool.allocate(FORMATS[format], _kv_shape(decoder), 8, META)
            _run_steps(decoder, pool)
            copy_blocks(pool.data, _ints(2), _ints(2))
    _draw(model.spec.vocab_size)


def _run_steps(decoder: Decoder, pool: KVPool) -> None:
    for lengths, width in STEPS:
        num_tokens = sum(lengths)
        is_first, size = decoder.part.has_ends, decoder.spec.hidden_size
        entering = _ints(num_tokens) if is_first else torch.empty(num_tokens, size, device=META)
        hidden = decoder.forward(entering, _inputs(lengths, width), pool.layers())
        if is_first:
            hidden = hidden if decoder.is_whole else decoder.final_norm(hidden)
            decoder.logits(hidden.index_select(0, _ints(len(lengths))))
    if is_first:
        decoder.logits(hidden[:PROMPT_ROWS])


def _kv_shape(decoder: Decoder) -> KVShape:
    heads = decoder.heads
    return KVShape(len(decoder.part.layers), heads.num_kv_heads, heads.head_dim, 16)


def _inputs(lengths: Sequence[int], width: int) -> AttentionInputs:
    num_requests, num_tokens = len(lengths), sum(lengths)
    return AttentionInputs(
        positions=_ints(num_tokens),
        slots=_ints(num_tokens),
        query_start=_ints(num_requests + 1),
        context_len=_ints(num_requests),
        block_tables=_ints(num_requests, width),
    )


def _draw(vocab_size: int) -> None:
    logits = torch.empty(2, vocab_size, device=META)
    seen = np.arange(2, dtype=np.int32)
    mask = torch.zeros(2, -(-vocab_size // 32), dtype=torch.int32)
    penalty = Adjustment({}, seen, seen, repetition=1.1)
    for draw, changes in DRAWS:
        adjustments = [penalty if changes else None, None]
        inputs = SamplingInputs.of([draw, draw], "cpu", adjustments, mask if changes else None)
        sample(logits, moved_inputs(inputs, META))


def _ints(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.int32, device=META)
