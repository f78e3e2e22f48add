"""The one place that turns the exception family into HTTP: rows of type, status, kind and code.

A dialect writes a Fault in its own shape; OpenAI's is here, for all paths that have no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypeAlias, TypedDict

import msgspec
from aiohttp import web

from quantd.daemon.activity import current_request_id, note_error
from quantd.daemon.errors import (
    DiskFullError,
    EngineStoppedError,
    ForeignSiteError,
    KeyNeededError,
    KeyNotFoundError,
    ModelNotFoundError,
    NotAllowedError,
    NotServedError,
    OverloadedError,
    PrefixNotFoundError,
    PreviousResponseError,
    RequestCancelledError,
    RequestNotFoundError,
    ResponseNotFoundError,
    ThreadsUnsupportedError,
)
from quantd.engine.errors import CapacityError, ContextLengthError, EngineDiedError, RequestError
from quantd.kernels.errors import QuantdError
from quantd.quant.errors import CheckpointError, UnsupportedModelError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fault:
    """An error in words. kind and code: OpenAI's type and code. context: (prompt tokens, limit) of a
    prompt that is too long. request_id: names the request that it answers.
    """

    status: int
    message: str
    kind: str = "server_error"
    code: str | None = None
    param: str | None = None
    context: tuple[int, int] | None = None
    request_id: str = field(default_factory=current_request_id, compare=False)


ErrorShape: TypeAlias = Callable[[Fault], Mapping[str, Any]]
"""Writes a fault as the JSON body of a dialect; the type that it returns describes it to clients."""

# Finds the shape that a request's errors are told in.
ERROR_SHAPE = web.AppKey[Callable[[web.Request], ErrorShape]]("error_shape")
# The status that a request's dialect has for one of the rows below.
ERROR_STATUS = web.AppKey[Callable[[web.Request, int], int]]("error_status")
REQUEST_ID_HEADER = "request-id"

# What an HTTP error tells beside its reason.
_TOLD_HEADERS = ("Allow", "Accept-Encoding")

# What goes with any error of a status (RFC 9110, sections 10.2.3 and 11.6.1).
_STATUS_HEADERS: Mapping[int, Mapping[str, str]] = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}

# The first row that an error is an instance of counts.
_ROWS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (PreviousResponseError, 400, "invalid_request_error", "previous_response_not_found"),
    (ThreadsUnsupportedError, 400, "invalid_request_error", "thread_unsupported_request"),
    (RequestError, 400, "invalid_request_error", None),
    (KeyNeededError, 401, "invalid_request_error", "invalid_api_key"),
    (NotAllowedError, 403, "permission_error", "not_allowed"),
    (ForeignSiteError, 403, "permission_error", "foreign_site"),
    (KeyNotFoundError, 404, "invalid_request_error", None),
    (ModelNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (ResponseNotFoundError, 404, "invalid_request_error", None),
    (PrefixNotFoundError, 404, "invalid_request_error", None),
    (DiskFullError, 507, "server_error", "insufficient_storage"),
    (RequestNotFoundError, 404, "invalid_request_error", "request_not_found"),
    # A status for which no client tries again by itself.
    (RequestCancelledError, 410, "invalid_request_error", "cancelled"),
    (NotServedError, 501, "server_error", "not_supported"),
    (OverloadedError, 429, "rate_limit_error", "overloaded"),
    (CapacityError, 503, "server_error", "insufficient_memory"),
    (EngineStoppedError, 503, "server_error", "engine_stopped"),
    (EngineDiedError, 503, "server_error", "engine_died"),
    (CheckpointError, 500, "server_error", "model_load_failed"),
    (UnsupportedModelError, 500, "server_error", "model_load_failed"),
    (QuantdError, 500, "server_error", None),
)


def fault_of(error: Exception) -> Fault:
    """The fault that an error is. One outside the family is our own and is logged."""
    for kind, status, type_name, code in _ROWS:
        if isinstance(error, kind):
            context = (error.prompt_len, error.limit) if isinstance(error, ContextLengthError) else None
            return Fault(status, str(error), type_name, code, getattr(error, "param", None), context)
    _log.error("a request failed in a way it should not", exc_info=error)
    return Fault(500, f"internal error: {type(error).__name__}; the daemon's log has the details")


class OpenAIError(TypedDict):
    message: str
    type: str
    param: str | None
    code: str | None
    n_prompt_tokens: NotRequired[int]
    n_ctx: NotRequired[int]


class OpenAIErrorBody(TypedDict):
    error: OpenAIError


def openai_error(fault: Fault) -> OpenAIErrorBody:
    """OpenAI's shape; a context that is too short is told with llama-server's two numbers."""
    error: OpenAIError = {
        "message": fault.message,
        "type": fault.kind,
        "param": fault.param,
        "code": fault.code,
    }
    if fault.context is not None:
        error["n_prompt_tokens"], error["n_ctx"] = fault.context
    return {"error": error}


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON answer."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json"
    )


@web.middleware
async def answer_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """The boundary of HTTP requests: every error becomes an answer in the shape of its dialect."""
    headers = {}
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except web.HTTPException as error:
        if error.status < 400:
            raise
        headers = {name: error.headers[name] for name in _TOLD_HEADERS if name in error.headers}
        message = f"{error.reason}: {request.method} {request.path}"
        fault = Fault(error.status, message, "invalid_request_error")
    except web.RequestPayloadError:
        reason = "the body is not what its Transfer-Encoding says"
        fault = fault_of(RequestError(reason))
    except Exception as error:
        fault = fault_of(error)
    note_error(fault.message)
    headers |= _STATUS_HEADERS.get(fault.status, {})
    headers[REQUEST_ID_HEADER] = fault.request_id
    shape = request.app[ERROR_SHAPE](request)
    return json_response(shape(fault), request.app[ERROR_STATUS](request, fault.status), headers)
