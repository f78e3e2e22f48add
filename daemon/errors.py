"""What the daemon itself can refuse. `wire/` turns the whole family into each dialect's errors."""

from quantd.engine.errors import CapacityError, EngineDiedError, RequestError
from quantd.kernels.errors import QuantdError


class ModelNotFoundError(QuantdError):
    """No model of this name is in the store."""


class PrefixNotFoundError(QuantdError):
    """No prefix of this id is on disk."""


class ResponseNotFoundError(QuantdError):
    """No response, or no item of one, with this id is stored."""


class PreviousResponseError(RequestError):
    """A response is to go on from one that is not stored."""


class ThreadsUnsupportedError(RequestError):
    """A client of Anthropic's wants its conversation kept here; it may send all of it instead."""


class StoreError(QuantdError):
    """A pull, import or removal could not be done."""


class DiskFullError(StoreError):
    """The disk is too full for a model."""


class ConfigError(QuantdError):
    """A flag, file key or variable holds a bad value."""


class ListenError(QuantdError):
    """A socket or port cannot be bound; the message names it and the reason."""


class NoInfillError(RequestError):
    """A model that has not learnt to fill gaps was asked to."""


class NotServedError(QuantdError):
    """This daemon does not do what was asked, whatever the request."""


class KeyNeededError(QuantdError):
    """A request brings no API key, or none that counts, where one is needed."""


class NotAllowedError(QuantdError):
    """A client asks for what it has no right to; the message says who has."""


class ForeignSiteError(QuantdError):
    """A web page of another site reached a port of this machine."""


class KeyFileError(QuantdError):
    """The file of API keys cannot be used; the message names it and the reason."""


class KeyNotFoundError(QuantdError):
    """There is no API key of this name."""


class OverloadedError(QuantdError):
    """Too much waits already; try again later."""


class EngineStoppedError(EngineDiedError):
    """A model's engine has died so often that it is not started again before somebody asks for it."""


class NoRoomError(CapacityError):
    """Memory is short for a model, and no other model may go for it."""


class DaemonError(QuantdError):
    """A daemon answered a client with an error. `code` is the machine-readable reason, if it gave one."""

    def __init__(self, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class NoDaemonError(QuantdError):
    """No daemon answers where a client looked."""


class RequestCancelledError(QuantdError):
    """Someone else has ended the request, so that to send it again is not what is wanted."""


class RequestNotFoundError(QuantdError):
    """No request of this name is under way."""


class GenerationError(QuantdError):
    """An engine gave up one request; the message says why."""


class ServiceError(QuantdError):
    """A unit of systemd cannot be installed, removed or asked about; the message has systemd's reason."""
