"""llama.cpp measured, through llama-cpp-python in this process. Rates in tokens a second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from llama_cpp import Llama

_GGML_TYPE_Q8_0 = 8
_GGML_TYPE_F16 = 1


class LlamaCpp:
    """A GGUF model. quantized_cache: q8_0 with flash attention, else fp16 as by default."""

    name = "llama.cpp"

    def __init__(self, file: Path, context_len: int, threads: int, quantized_cache: bool = False) -> None:
        kind = _GGML_TYPE_Q8_0 if quantized_cache else _GGML_TYPE_F16
        self._context: list[int] = []
        self._model = Llama(
            str(file),
            n_ctx=context_len,
            n_batch=512,
            n_ubatch=512,
            n_threads=threads,
            n_threads_batch=threads,
            type_k=kind,
            type_v=kind,
            flash_attn=quantized_cache,
            verbose=False,
        )

    def prefill_rate(self, prompt: Sequence[int]) -> float:
        """Of a prompt that is new."""
        self._context = []
        self._model.reset()
        begun = time.perf_counter()
        self._model.eval(prompt)
        return len(prompt) / (time.perf_counter() - begun)

    def decode_rate(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Of num_tokens after the prompt, whose time does not count. Nothing is sampled.

        A prompt is evaluated once for several calls in a row.
        """
        if self._context != list(prompt):
            self._model.reset()
            self._model.eval(prompt)
            self._context = list(prompt)
        self._model.n_tokens = len(prompt)
        begun = time.perf_counter()
        for index in range(num_tokens):
            self._model.eval([prompt[index % len(prompt)]])
        return num_tokens / (time.perf_counter() - begun)

    def queue_rate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> float:
        """Tokens out for requests one after another, each reusing its prefix in common with the last."""
        self._context = []
        self._model.reset()
        begun = time.perf_counter()
        for prompt in prompts:
            tokens = self._model.generate(list(prompt), temp=0.0)
            for _ in range(num_tokens):
                next(tokens)
            tokens.close()
        return len(prompts) * num_tokens / (time.perf_counter() - begun)


def first_token_seconds(file: Path, prompt: Sequence[int], threads: int) -> float:
    """From nothing to the first token, within a process that runs already."""
    begun = time.perf_counter()
    LlamaCpp(file, context_len=1024, threads=threads).prefill_rate(prompt)
    return time.perf_counter() - begun
