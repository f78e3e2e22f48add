"""What is kept for each client apart, so that none sees what is another's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from quantd.daemon.access.scope import Client

T = TypeVar("T")


class PerClient(Generic[T]):
    """One thing for each client, made when it is first wanted."""

    def __init__(self, make: Callable[[Client], T]) -> None:
        self._make = make
        self._made: dict[Client, T] = {}

    def of(self, client: Client) -> T:
        """The client's own."""
        if client not in self._made:
            self._made[client] = self._make(client)
        return self._made[client]
