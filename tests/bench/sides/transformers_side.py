"""transformers measured in fp32, as `from_pretrained` gives a model on a CPU. Rates in tokens a second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar


class Transformers:
    """A GGUF model, dequantized."""

    name = "transformers"

    def __init__(self, file: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        disable_progress_bar()
        self._model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def prefill_rate(self, prompt: Sequence[int]) -> float:
        """Of a prompt that is new; only the last position's logits are wanted."""
        begun = time.perf_counter()
        self._model(torch.tensor([list(prompt)]), logits_to_keep=1)
        return len(prompt) / (time.perf_counter() - begun)

    @torch.inference_mode()
    def decode_rate(self, prompt: Sequence[int], num_tokens: int) -> float:
        """Of num_tokens after the prompt."""
        cache = DynamicCache()
        self._step(prompt, cache)
        begun = time.perf_counter()
        for index in range(num_tokens):
            self._step([prompt[index % len(prompt)]], cache)
        return num_tokens / (time.perf_counter() - begun)

    def _step(self, ids: Sequence[int], cache: DynamicCache) -> None:
        # By position, for the cache's keyword has two names among the versions.
        self._model(torch.tensor([list(ids)]), None, None, cache, use_cache=True, logits_to_keep=1)
