"""What is kept of responses, and for how long."""

from __future__ import annotations

from typing import Any

import pytest

from quantd.daemon.errors import ResponseNotFoundError
from quantd.daemon.response_store import ResponseStore, StoredResponse


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def stored(number: int, text: str = "") -> StoredResponse:
    item: dict[str, Any] = {"id": f"msg_{number}", "text": text}
    response = {"id": f"resp_{number}", "output": [{"id": f"out_{number}"}]}
    return StoredResponse(response, [item])


def held(store: ResponseStore, count: int) -> set[int]:
    """Which of the first responses are there; looks at none of them in the store's order of use."""
    found = set()
    for number in range(count):
        try:
            store.item(f"msg_{number}")
        except ResponseNotFoundError:
            continue
        found.add(number)
    return found


def test_what_goes_in_comes_out() -> None:
    store = ResponseStore()
    store.put(stored(1, "é"))
    assert store.get("resp_1") == stored(1, "é")
    assert store.get("resp_1").conversation == [{"id": "msg_1", "text": "é"}, {"id": "out_1"}]
    assert store.item("out_1") == {"id": "out_1"}
    store.put(stored(1, "new"))
    assert store.get("resp_1").input[0]["text"] == "new"
    store.delete("resp_1")
    for miss in (store.get, store.delete):
        with pytest.raises(ResponseNotFoundError, match="resp_1"):
            miss("resp_1")
    with pytest.raises(ResponseNotFoundError, match="out_1"):
        store.item("out_1")


def test_the_least_recently_used_go_for_room() -> None:
    store = ResponseStore(max_bytes=1000)
    for number in range(3):
        store.put(stored(number, "x" * 200))
    store.get("resp_0")
    store.put(stored(3, "x" * 200))
    assert held(store, 4) == {0, 2, 3}
    store.put(stored(4, "x" * 2000))
    assert held(store, 5) == set()
    store.put(stored(5, "x" * 200))
    assert held(store, 6) == {5}


def test_what_is_not_used_for_long_goes() -> None:
    clock = Clock()
    store = ResponseStore(ttl_seconds=10, clock=clock)
    store.put(stored(0))
    store.put(stored(1))
    clock.now = 8
    store.get("resp_0")
    clock.now = 12
    with pytest.raises(ResponseNotFoundError):
        store.get("resp_1")
    assert store.get("resp_0") == stored(0)
    clock.now = 30
    with pytest.raises(ResponseNotFoundError):
        store.get("resp_0")
