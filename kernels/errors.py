"""The root of quantd's one exception family. Each package adds its own leaves in its `errors.py`."""


class QuantdError(Exception):
    """Anything a user, a file or a machine can cause; the message names the thing and what to do.

    A file may spell what is no text (half a surrogate pair), so a message shows that by its number.
    """

    def __str__(self) -> str:
        return super().__str__().encode(errors="backslashreplace").decode()
