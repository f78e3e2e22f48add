"""What a program has to be told of a daemon: its address, a model, and how much that model takes."""

from __future__ import annotations

from dataclasses import dataclass

from quantd.daemon.capabilities import Capabilities
from quantd.daemon.errors import ConfigError

_MOST_OUTPUT = 16384


@dataclass(frozen=True)
class Endpoint:
    """One model of a daemon.

    max_model_len: tokens of prompt and answer together. capabilities: what the model can do. None for either
    where nobody here knows. answers: whether the daemon does. is_loaded: whether max_model_len is what is
    served, or only the most that could be. key: an API key. wants_key: whether the daemon refuses programs
    that come with that key, or with none.
    """

    host: str
    port: int
    model: str
    max_model_len: int | None
    capabilities: Capabilities | None = None
    answers: bool = False
    is_loaded: bool = False
    key: str | None = None
    wants_key: bool = False

    @property
    def host_port(self) -> str:
        """127.0.0.1:11435"""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def root(self) -> str:
        """The base of Ollama's, Anthropic's and llama-server's paths."""
        return f"http://{self.host_port}"

    @property
    def v1(self) -> str:
        """The base of OpenAI's paths."""
        return f"{self.root}/v1"

    @property
    def any_key(self) -> str:
        """A key for programs that do not go without one; a daemon that has made none does not look at it."""
        return self.key or "quantd"

    @property
    def context(self) -> int:
        """max_model_len for a file that needs it. Raises ConfigError where it is not known."""
        if self.max_model_len is None:
            raise ConfigError(
                f"how long a context {self.model} has is not known: quantd load {self.model} first"
            )
        return self.max_model_len

    @property
    def max_output(self) -> int:
        """The part of the context to be left to an answer, for programs that divide it themselves."""
        return min(self.context // 4, _MOST_OUTPUT)

    @property
    def takes_tools(self) -> bool:
        """Whether the model does, as far as is known."""
        return self.capabilities is None or self.capabilities.tools

    @property
    def infills(self) -> bool:
        """Whether the model does, as far as is known."""
        return self.capabilities is None or self.capabilities.infill is not None
