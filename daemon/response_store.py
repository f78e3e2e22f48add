"""Responses that clients may come back to, within bounds of bytes and time."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from quantd.daemon.errors import ResponseNotFoundError

Item: TypeAlias = dict[str, Any]


class StoredResponse(msgspec.Struct, frozen=True):
    """A response as its client gets it, and all items that it answers, those of earlier turns too.

    frames: its stream, of one that was made in the background.
    """

    response: dict[str, Any]
    input: list[Item]
    frames: list[bytes] = []

    @property
    def conversation(self) -> list[Item]:
        """What a next turn goes on from."""
        return [*self.input, *self.response["output"]]


@dataclass(frozen=True)
class _Entry:
    data: bytes
    item_ids: frozenset[str]
    used: float


class ResponseStore:
    """In memory, as JSON. The least recently used go for room, and any that was not used for ttl_seconds."""

    def __init__(
        self,
        max_bytes: int = 256 * 2**20,
        ttl_seconds: float = 6 * 3600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._num_bytes = 0

    def put(self, stored: StoredResponse) -> None:
        """Keep a response under its id, in place of one that is there."""
        data = msgspec.json.encode(stored)
        self._drop(stored.response["id"])
        ids = frozenset(item["id"] for item in stored.conversation)
        self._entries[stored.response["id"]] = _Entry(data, ids, self._clock())
        self._num_bytes += len(data)
        self._make_room()

    def get(self, id: str) -> StoredResponse:
        """The response of this id, which is used by this. Raises ResponseNotFoundError."""
        self._make_room()
        entry = self._entries.pop(id, None)
        if entry is None:
            raise ResponseNotFoundError(
                f"no response {id!r} is here: it was not stored, or not used for long"
            )
        self._entries[id] = _Entry(entry.data, entry.item_ids, self._clock())
        return msgspec.json.decode(entry.data, type=StoredResponse)

    def item(self, id: str) -> Item:
        """The item of this id in a stored conversation. Raises ResponseNotFoundError."""
        for name, entry in reversed(self._entries.items()):
            if id in entry.item_ids:
                return next(item for item in self.get(name).conversation if item["id"] == id)
        raise ResponseNotFoundError(f"no item {id!r} is in a stored response")

    def delete(self, id: str) -> None:
        """Forget a response. Raises ResponseNotFoundError."""
        self.get(id)
        self._drop(id)

    def _drop(self, id: str) -> None:
        if id in self._entries:
            self._num_bytes -= len(self._entries.pop(id).data)

    def _make_room(self) -> None:
        """The least recently used comes first, so that what is too old does too."""
        oldest = self._clock() - self._ttl_seconds
        while self._entries:
            id, entry = next(iter(self._entries.items()))
            if entry.used >= oldest and self._num_bytes <= self._max_bytes:
                return
            self._drop(id)
