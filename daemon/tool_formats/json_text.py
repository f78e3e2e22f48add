"""Where a JSON text ends that comes in parts."""

from __future__ import annotations


class JsonEnd:
    """Looks for the last bracket of a JSON object or list (RFC 8259)."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """The place after the last bracket in the next part of the text; None: it is not there yet."""
        for place, char in enumerate(text, 1):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if not self._depth:
                    return place
        return None
