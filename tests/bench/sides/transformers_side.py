"""transformers measured in fp32, as `from_pretrained` gives a model on a CPU. Rates in tokens a second."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import normalize
from torch.nn.utils.rnn import pad_sequence
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

    @torch.inference_mode()
    def embedding_rate(self, prompts: Sequence[Sequence[int]], batch_size: int) -> float:
        """Texts a second; the mean of each one's hidden states, padded to the longest of its batch."""
        begun = time.perf_counter()
        for start in range(0, len(prompts), batch_size):
            rows = [torch.tensor(prompt) for prompt in prompts[start : start + batch_size]]
            ids = pad_sequence(rows, batch_first=True)
            mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
            hidden = self._model.model(ids, attention_mask=mask, use_cache=False).last_hidden_state
            normalize((hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)).numpy()
        return len(prompts) / (time.perf_counter() - begun)

    def _step(self, ids: Sequence[int], cache: DynamicCache) -> None:
        # By position, for the cache's keyword has two names among the versions.
        self._model(torch.tensor([list(ids)]), None, None, cache, use_cache=True, logits_to_keep=1)
