"""What the tokenizers library fails with, which is told as an error of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quantd.kernels.errors import QuantdError


@contextmanager
def failures_told(told: Callable[[str], QuantdError]) -> Iterator[None]:
    """Raise what `told` makes of the reason where the body, which calls the library, fails.

    Its bindings raise bare Exceptions and Python's own for faults of a file or a text, and where its core
    panics what is no Exception.
    """
    try:
        yield
    except QuantdError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise told(str(error)) from error
