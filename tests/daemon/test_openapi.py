"""The description of all routes, and requests that follow it, well formed and not (schemathesis)."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import schemathesis
from daemon_in_loop import in_loop, running_daemon
from fake_models import QWEN_INFILL
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from quantd.daemon.access.keys import KeyFile
from quantd.daemon.access.policy import Access
from quantd.daemon.app import ROUTES
from quantd.engine.request import Request

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
# What is not served at all is a 501, as documented, and these change which models there are.
NOT_SERVED = {"/api/push", "/v1/rerank", "/v1/reranking"}
CHANGES_MODELS = {"/api/pull", "/api/create", "/api/copy", "/api/delete"}


# Fields that make a body one that is served; those that a route does not know it ignores.
SERVED = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "prompt": "hi",
    "input": "hi",
    "content": "hi",
    "input_prefix": "hi",
    "input_suffix": "",
    "tokens": [40, 41],
    "max_tokens": 4,
}


def mend(case: schemathesis.Case, number: int) -> None:
    """Leave one field of a body or query as it is, and make of the rest what is served."""
    if case.operation.path in CHANGES_MODELS:
        return
    if isinstance(case.body, dict) and case.body:
        name = sorted(case.body)[number % len(case.body)]
        case.body = SERVED | {"stream": number % 3 == 0, name: case.body[name]}
        case.body.pop("verbose", None)  # lists tensors, of which the model has none
        if "/responses" in case.operation.path and name != "prompt":
            del case.body["prompt"]  # which means something else there
    if "model" in (case.query or {}):
        case.query["model"] = "tiny"


@schemathesis.deserializer("application/x-ndjson")
def lines(_: schemathesis.DeserializationContext, response: schemathesis.Response) -> list[Any]:
    return [json.loads(line) for line in response.content.splitlines()]


def closed(document: dict[str, Any]) -> dict[str, Any]:
    """The description where answers have no fields but those in it."""
    components = document["components"]["schemas"]
    answers = [
        content
        for path, operations in document["paths"].items()
        for operation in operations.values()
        for response in operation["responses"].values()
        for content in response.get("content", {}).values()
        if not path.startswith("/quantd/")
    ]
    open_names, seen = refs(answers), set[str]()
    while open_names:
        name = open_names.pop()
        seen.add(name)
        open_names |= refs(components[name]) - seen
        if components[name].get("type") == "object":
            components[name].setdefault("additionalProperties", False)
    return document


def refs(schema: object) -> set[str]:
    return set(re.findall(r"#/components/schemas/([\w.]+)", json.dumps(schema)))


def send_all(url: str, key: str, document: dict[str, Any], max_examples: int) -> None:
    """With a key that may all, send requests of each operation and look at the answers."""
    for result in schemathesis.openapi.from_dict(closed(document)).get_all_operations():
        operation = result.ok()
        if operation.path not in NOT_SERVED:
            modes = (operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode)
            send(st.one_of(*modes), url, key, max_examples)


def send(cases: st.SearchStrategy[schemathesis.Case], url: str, key: str, max_examples: int) -> None:
    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases, number=st.integers(0, 99))
    def check(case: schemathesis.Case, number: int) -> None:
        if number % 4:
            mend(case, number)
        case.call_and_validate(base_url=url, headers={"x-api-key": key}, checks=CHECKS)

    check()


def ends_soon(request: Request) -> list[int]:
    """Two tokens and an end, again and again."""
    return [40, 41, 513] * 200


@in_loop
async def test_whatever_follows_the_description_has_a_described_answer(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("test", "admin")
    async with running_daemon(ends_soon, tokens=QWEN_INFILL, access=Access(keys)) as daemon:
        _, document = await daemon.get("/openapi.json")
        await asyncio.to_thread(send_all, f"http://127.0.0.1:{daemon.port}", key, document, 5)


@in_loop
async def test_every_route_is_described() -> None:
    async with running_daemon() as daemon:
        _, document = await daemon.get("/openapi.json")
        described = {
            (method.upper(), re.sub(r"\{\w+\}", "x", path.removeprefix("/v1")))
            for path, operations in document["paths"].items()
            for method in operations
        }
        served = {(route.method, re.sub(r"\{\w+(:[^/]*)?\}", "x", route.path)) for route in ROUTES}
        assert described == served
        assert all(
            content.get("schema") or media_type.startswith("text/")
            for operations in document["paths"].values()
            for operation in operations.values()
            for response in operation["responses"].values()
            for media_type, content in response.get("content", {}).items()
        )
        assert all(
            operation["summary"]
            for operations in document["paths"].values()
            for operation in operations.values()
        )
