"""The one place that turns the exception family into HTTP: rows of type, status, kind and code.

The shape is OpenAI's: {"error": {"message", "type", "param", "code"}}.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from aiohttp import web

from quantd.daemon.errors import ModelNotFoundError, OverloadedError
from quantd.engine.errors import CapacityError, ContextLengthError, EngineDiedError, RequestError
from quantd.kernels.errors import QuantdError
from quantd.quant.errors import CheckpointError, UnsupportedModelError

_log = logging.getLogger(__name__)

# The first row that an error is an instance of counts.
_ROWS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (RequestError, 400, "invalid_request_error", None),
    (ModelNotFoundError, 404, "invalid_request_error", "model_not_found"),
    (OverloadedError, 429, "rate_limit_error", "overloaded"),
    (CapacityError, 503, "server_error", "insufficient_memory"),
    (EngineDiedError, 503, "server_error", "engine_died"),
    (CheckpointError, 500, "server_error", "model_load_failed"),
    (UnsupportedModelError, 500, "server_error", "model_load_failed"),
    (QuantdError, 500, "server_error", None),
)


def error_body(error: Exception) -> tuple[int, dict[str, Any]]:
    """The status and JSON body of an error. One outside the family is our own fault and is logged."""
    for kind, status, type_name, code in _ROWS:
        if isinstance(error, kind):
            body = {
                "message": str(error),
                "type": type_name,
                "param": getattr(error, "param", None),
                "code": code,
            }
            if isinstance(error, ContextLengthError):
                body |= {"n_prompt_tokens": error.prompt_len, "n_ctx": error.limit}
            return status, {"error": body}
    _log.error("a request failed in a way it should not", exc_info=error)
    message = f"internal error: {type(error).__name__}; the daemon's log has the details"
    return 500, {"error": {"message": message, "type": "server_error", "param": None, "code": None}}


def error_response(error: Exception) -> web.Response:
    """The whole HTTP answer."""
    status, body = error_body(error)
    headers = {"Retry-After": "1"} if status == 429 else {}
    return json_response(body, status, headers)


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON answer."""
    return web.Response(
        body=msgspec.json.encode(body), status=status, headers=headers, content_type="application/json"
    )


@web.middleware
async def answer_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """The boundary of HTTP requests: every error becomes an answer in the one shape."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except web.HTTPException as error:
        if error.status < 400:
            raise
        allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        message = f"{error.reason}: {request.method} {request.path}"
        body = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        return json_response({"error": body}, error.status, allow)
    except web.RequestPayloadError:
        fault = "the body is not what its Content-Encoding or Transfer-Encoding says"
        return error_response(RequestError(fault))
    except Exception as error:
        return error_response(error)
