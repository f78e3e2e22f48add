"""What an answer must be: each kind gives its grammar in llguidance's form."""

from __future__ import annotations

from typing import Protocol


class Constraint(Protocol):
    """A rule that an answer has to follow."""

    def grammar(self) -> str:
        """The rule as a grammar of llguidance. Raises RequestError naming what cannot be enforced."""
