"""What a request or a running engine can do wrong."""

from quantd.kernels.errors import QuantdError


class RequestError(QuantdError):
    """A request holds an invalid value. `param` names the field at fault as the client spells it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """A prompt (plus what was asked to be generated) cannot fit; nothing is ever cut instead."""

    def __init__(self, prompt_len: int, limit: int, message: str) -> None:
        super().__init__(message, "messages")
        self.prompt_len = prompt_len
        self.limit = limit


class CapacityError(QuantdError):
    """The machine's memory cannot hold what was asked for. shortage: bytes that are wanting; 0: unknown.

    urgent: false where it can be done without, only not well. on_gpu: whose memory it is, None for any.
    """

    def __init__(
        self, message: str = "", shortage: int = 0, urgent: bool = True, on_gpu: bool | None = None
    ) -> None:
        super().__init__(message)
        self.shortage = shortage
        self.urgent = urgent
        self.on_gpu = on_gpu


class EngineDiedError(QuantdError):
    """The engine process ended while a request was in it."""


class NotBegunError(EngineDiedError):
    """The engine process ended before it had begun with a request, which another engine can serve."""


class NumericsError(QuantdError):
    """A forward pass gave NaN or Inf; the message names the layer."""


class RankError(QuantdError):
    """The ranks of a model are lost to each other; the engine cannot go on."""


class StepMemoryError(QuantdError):
    """Some rank has not the memory that a step takes. No rank has begun with the step."""
