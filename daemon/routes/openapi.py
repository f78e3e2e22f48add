"""GET /openapi.json: all routes, with their bodies, queries and statuses (OpenAPI 3.1.0).

Everything in it is read from the tables of routes, from the types that parse what clients send, and from
those of what is answered. The schema of a stream of events is that of each, of lines that of their list.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from quantd.daemon.access.scope import Scope
from quantd.daemon.routes.content import JSON, Content, json_of
from quantd.daemon.routes.keys import CONTROL, TABLE
from quantd.daemon.routes.route import Route
from quantd.daemon.wire.errors import Fault, json_response

# A parameter in a path, maybe with the pattern that it has to match.
_PARAMETER = re.compile(r"\{(\w+)(?::((?:[^{}]|\{[^{}]*\})+))?\}")
_REF = "#/components/schemas/{name}"


def openapi_document(routes: Sequence[Route], version: str) -> dict[str, Any]:
    """The description of these routes. Paths that go with and without /v1 are told once, with it."""
    types = list(dict.fromkeys(kind for route in routes for kind in _types(route)))
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", ("/v1" if route.versioned else "") + route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of, components)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "quantd",
            "version": version,
            "description": "Paths below /v1 work without it too, and all paths with a slash at their end.",
        },
        "paths": paths,
        "components": {"schemas": components},
    }


async def openapi(request: web.Request) -> web.StreamResponse:
    """GET /openapi.json: this description."""
    return json_response(openapi_document(request.app[TABLE], request.app[CONTROL].version))


def _types(route: Route) -> Iterator[Any]:
    yield from (kind for kind in (route.body, route.query) if kind is not None)
    yield from (kind for content in route.contents for kind in content.types)
    yield _error_type(route)


def _error_type(route: Route) -> Any:
    return typing.get_type_hints(route.errors)["return"]


def _operation(
    route: Route, schema_of: Mapping[type, Mapping[str, Any]], components: Mapping[str, Any]
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": (inspect.getdoc(route.handler) or "").split("\n\n")[0],
        "parameters": [*_path_parameters(route), *_query_parameters(route, schema_of, components)],
        "responses": _responses(route, schema_of),
    }
    if route.body is not None:
        content = {"application/json": {"schema": schema_of[route.body]}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string"} | ({"pattern": f"^(?:{pattern})$"} if pattern else {}),
        }
        for name, pattern in _PARAMETER.findall(route.path)
    ]


def _query_parameters(
    route: Route, schema_of: Mapping[type, Mapping[str, Any]], components: Mapping[str, Any]
) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    schema = components[schema_of[route.query]["$ref"].rpartition("/")[2]]
    required = schema.get("required", ())
    return [
        {"name": name, "in": "query", "required": name in required, "schema": field}
        for name, field in schema["properties"].items()
    ]


def _responses(route: Route, schema_of: Mapping[Any, Mapping[str, Any]]) -> dict[str, Any]:
    contents = {content.media_type: _content(route, content, schema_of) for content in route.contents}
    told = {"content": contents} if contents else {}
    responses = {str(status): {"description": HTTPStatus(status).phrase} | told for status in route.successes}
    for status in sorted({route.statuses.get(status, status) for status in _refusals(route)}):
        fault = Fault(status, "what is wrong", request_id="req_0")
        error = {"schema": schema_of[_error_type(route)], "example": route.errors(fault)}
        phrase = HTTPStatus(status).phrase
        responses[str(status)] = {"description": phrase, "content": {"application/json": error}}
    return responses


def _content(route: Route, content: Content, schema_of: Mapping[Any, Mapping[str, Any]]) -> Mapping[str, Any]:
    """A media type; in a stream errors come too."""
    if not content.types:
        return {}
    types = [*content.types, *(() if content.media_type == JSON else (_error_type(route),))]
    schemas = [schema_of[kind] for kind in types]
    return {"schema": content.framed(schemas[0] if len(schemas) == 1 else {"anyOf": schemas})}


def _refusals(route: Route) -> Iterable[int]:
    """Pages of foreign sites are refused by every route, and who needs a key or a right and has none."""
    yield from (401, 403)
    yield from route.refusals
    if route.body is not None:
        yield from (400, 413, 415)
    if route.query is not None:
        yield 400
    if "{" in route.path:
        yield from (400, 404)


OPENAPI_ROUTES: Sequence[Route] = (
    Route("GET", "/openapi.json", openapi, Scope.INFER, contents=[json_of(dict[str, Any])]),
)
