"""The smallest request of each kind that programs make, as a line for the shell."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantd.daemon.connect.endpoint import Endpoint

_MESSAGES = [{"role": "user", "content": "Say hi"}]
_PREFIX, _SUFFIX = "def add(a, b):\n    return ", "\n"


@dataclass(frozen=True)
class Probe:
    """A POST. body: all of it but the model. infills: whether it is for models that can do that only."""

    path: str
    body: Mapping[str, Any]
    infills: bool = False

    def suits(self, endpoint: Endpoint) -> bool:
        """Whether the model can answer it."""
        return endpoint.infills or not self.infills

    def line(self, endpoint: Endpoint) -> str:
        """A call of curl."""
        body = json.dumps({"model": endpoint.model, **self.body})
        headers = ["Content-Type: application/json"]
        if endpoint.key is not None:
            headers.append(f"Authorization: Bearer {endpoint.key}")
        options = " ".join(f"-H {shlex.quote(header)}" for header in headers)
        return f"curl {endpoint.root}{self.path} {options} -d {shlex.quote(body)}"


CHAT = Probe("/v1/chat/completions", {"messages": _MESSAGES, "max_tokens": 32})
RESPONSES = Probe("/v1/responses", {"input": "Say hi", "max_output_tokens": 32})
MESSAGES = Probe("/v1/messages", {"messages": _MESSAGES, "max_tokens": 32})
_OLLAMA_LIMITS = {"stream": False, "options": {"num_predict": 32}}
OLLAMA_CHAT = Probe("/api/chat", {"messages": _MESSAGES, **_OLLAMA_LIMITS})
OLLAMA_INSERT = Probe("/api/generate", {"prompt": _PREFIX, "suffix": _SUFFIX, **_OLLAMA_LIMITS}, infills=True)
SUFFIX = Probe("/v1/completions", {"prompt": _PREFIX, "suffix": _SUFFIX, "max_tokens": 32}, infills=True)
INFILL = Probe("/infill", {"input_prefix": _PREFIX, "input_suffix": _SUFFIX, "n_predict": 32}, infills=True)
