"""What is sent to a model to measure it: loads as plain data, and their prompts. Lengths in tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from random import Random
from typing import Literal

import msgspec

from quantd.daemon.errors import ConfigError
from quantd.engine.messages import ModelInfo

Kind = Literal["decode", "prefill", "concurrency", "prefix-cold", "prefix-cached"]

# How many clients share a prefix: the agents and editors of one desk.
_NUM_SHARING = 8


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """Some clients that send one request each at the same moment.

    A prompt is shared_len tokens, the same for all of them, and prompt_len of its own. primed: the
    shared ones are in the prefix cache already.
    """

    kind: Kind
    prompt_len: int
    output_len: int
    num_clients: int = 1
    shared_len: int = 0
    primed: bool = False

    @property
    def request_len(self) -> int:
        """Tokens of one request at its end."""
        return self.shared_len + self.prompt_len + self.output_len


def standard_loads(
    num_clients: Collection[int], prompt_len: int, output_len: int, prefill_len: int, prefix_len: int
) -> list[Load]:
    """One client, a long prompt, several clients, and several that share a prefix."""
    usual = Load(kind="decode", prompt_len=prompt_len, output_len=output_len)
    replace = msgspec.structs.replace
    return [
        usual,
        Load(kind="prefill", prompt_len=prefill_len, output_len=1),
        *(replace(usual, kind="concurrency", num_clients=n) for n in sorted({*num_clients} - {1})),
        *shared_prefix_loads(prefix_len, prompt_len, output_len),
    ]


def shared_prefix_loads(
    shared_len: int, prompt_len: int, output_len: int, num_clients: int = _NUM_SHARING
) -> Iterator[Load]:
    """The same load twice: with a prefix that is new, and with one that is cached."""
    kinds: tuple[tuple[Kind, bool], ...] = (("prefix-cold", False), ("prefix-cached", True))
    for kind, primed in kinds:
        yield Load(
            kind=kind,
            num_clients=num_clients,
            shared_len=shared_len,
            prompt_len=prompt_len,
            output_len=output_len,
            primed=primed,
        )


def check_loads(loads: Collection[Load], info: ModelInfo) -> None:
    """Raise ConfigError for a load whose requests this model can never finish."""
    for load in loads:
        if load.request_len > info.max_request_len:
            raise ConfigError(
                f"the load {load.kind} has requests of {load.request_len} tokens, prompt and output, but "
                f"the model takes {info.max_request_len}: ask for shorter ones"
            )


def make_prompts(load: Load, vocab_size: int, rng: Random) -> tuple[list[int], list[list[int]]]:
    """The shared ids and each client's whole prompt: random ids, which no earlier prompt begins with."""
    shared = _random_ids(load.shared_len, vocab_size, rng)
    own = [_random_ids(load.prompt_len, vocab_size, rng) for _ in range(load.num_clients)]
    return shared, [shared + ids for ids in own]


def _random_ids(length: int, vocab_size: int, rng: Random) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(length)]
