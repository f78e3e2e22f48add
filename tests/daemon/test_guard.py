"""Every route of every surface is guarded: real sockets, keys, users and web pages."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import anthropic
import ollama
import openai
import pytest
from as_user import CAN_SWITCH, USERS, ask_as
from daemon_in_loop import in_loop, running_daemon
from fake_models import QWEN_INFILL
from waiting import until_so

from quantd.daemon.access.keys import KeyFile
from quantd.daemon.access.policy import Access
from quantd.daemon.access.scope import Scope
from quantd.daemon.access.sites import Sites
from quantd.daemon.app import ROUTES, make_app
from quantd.daemon.cli.client import DaemonClient
from quantd.daemon.control import Control
from quantd.daemon.errors import DaemonError
from quantd.daemon.routes.route import Route

CHAT = "/v1/chat/completions"
HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi there"}], "max_tokens": 2}
NOBODY = 2**31 - 9
PUBLIC = {("GET", "/"), ("GET", "/health")}
ADMIN = {
    ("POST", "/quantd/load"),
    ("POST", "/quantd/unload"),
    ("POST", "/quantd/cancel"),
    ("POST", "/quantd/stop"),
    ("POST", "/quantd/sleep"),
    ("POST", "/quantd/wake"),
    ("GET", "/quantd/cache"),
    ("POST", "/quantd/cache/rm"),
    ("POST", "/quantd/cache/pin"),
    ("GET", "/quantd/keys"),
    ("POST", "/quantd/keys"),
    ("DELETE", "/quantd/keys/{name}"),
    ("POST", "/api/pull"),
    ("POST", "/api/push"),
    ("POST", "/api/create"),
    ("POST", "/api/copy"),
    ("DELETE", "/api/delete"),
    ("HEAD", "/api/blobs/{digest}"),
    ("POST", "/api/blobs/{digest}"),
}


def some_path(route: Route) -> str:
    """A path that leads to a route."""
    return re.sub(r"\{(\w+)(:[^{}]*(\{[^{}]*\})?[^{}]*)?\}", "0", route.path)


async def call(
    session: aiohttp.ClientSession, route: Route, **headers: str
) -> tuple[int, Any, Mapping[str, str]]:
    async with session.request(route.method, some_path(route), headers=headers, data=b"{") as response:
        body = await response.read()
        return response.status, body, response.headers


def told(route: Route, status: int, body: bytes) -> str:
    """The message of an error in the dialect of its route."""
    error = json.loads(body)
    if route.path.startswith("/api/"):
        assert error.keys() == {"error"}
        return str(error["error"])
    if "messages" in route.path:
        assert error["type"] == "error" and error["request_id"]
        assert error["error"]["type"] == {401: "authentication_error", 403: "permission_error"}[status]
    elif "code" in error["error"] and isinstance(error["error"]["code"], int):  # llama-server
        assert error["error"]["code"] == status
        assert error["error"]["type"] == {401: "authentication_error", 403: "permission_error"}[status]
    else:
        assert error["error"]["code"] == {401: "invalid_api_key", 403: "not_allowed"}[status]
        assert error["error"]["type"] == {401: "invalid_request_error", 403: "permission_error"}[status]
    return str(error["error"]["message"])


def test_the_scope_of_every_route_is_one_that_was_thought_of() -> None:
    """A new route is INFER, or is listed here."""
    found = {(route.method, route.path): route.scope for route in ROUTES}
    assert {place for place, scope in found.items() if scope is Scope.PUBLIC} == PUBLIC
    assert {place for place, scope in found.items() if scope is Scope.ADMIN} == ADMIN


@in_loop
async def test_no_handler_is_reached_past_the_table(tmp_path: Path) -> None:
    async with running_daemon() as daemon:
        app = make_app(
            daemon.service, Control(daemon.service.models, "0", tmp_path, tmp_path), Access(KeyFile(tmp_path))
        )
        handlers = [route.handler for route in app.router.routes()]
        assert len(handlers) >= len(ROUTES)
        assert all(getattr(handler, "__func__", None) is Route.handle for handler in handlers)


@in_loop
async def test_every_route_wants_a_key_and_its_scope(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    infer, admin = keys.add("infer"), keys.add("admin", "admin")
    async with running_daemon(access=Access(keys)) as daemon, daemon.over_port() as session:
        for route in ROUTES:
            if route.path == "/quantd/stop":
                continue  # it would do it
            nobody = await call(session, route)
            wrong = await call(session, route, Authorization="Bearer wrong")
            least = await call(session, route, Authorization=f"Bearer {infer}")
            most = await call(session, route, **{"x-api-key": admin})
            statuses = [status for status, _, _ in (nobody, wrong, least, most)]
            place = (route.method, route.path)
            if route.scope is Scope.PUBLIC:
                assert not {401, 403} & set(statuses), place
                continue
            assert statuses[:2] == [401, 401], place
            assert nobody[2]["WWW-Authenticate"] == "Bearer"
            assert most[0] not in (401, 403) or route.path == "/api/me", place
            if route.method != "HEAD":
                assert "an API key is needed" in told(route, 401, nobody[1])
                assert "no longer" in told(route, 401, wrong[1])
            if route.scope is Scope.INFER:
                assert least[0] == most[0], place
            else:
                assert least[0] == 403, place
                if route.method != "HEAD":
                    assert "key:infer may use models" in told(route, 403, least[1])


@in_loop
async def test_what_is_no_route_is_guarded_too(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("a")
    async with running_daemon(access=Access(keys)) as daemon, daemon.over_port() as session:
        for method, path, status in (("GET", "/nosuch", 404), ("PUT", CHAT, 405), ("OPTIONS", CHAT, 405)):
            async with session.request(method, path) as response:
                assert response.status == 401
            async with session.request(method, path, headers={"Authorization": f"bearer {key}"}) as response:
                assert response.status == status


@in_loop
async def test_keys_by_the_routes_for_them(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    async with running_daemon(access=Access(keys)) as daemon:
        assert (await daemon.get("/quantd/keys"))[1]["keys"] == []
        status, added = await daemon.post("/quantd/keys", {"name": "laptop"})
        assert status == 200 and added["scope"] == "infer" and keys.find(added["key"])
        assert (await daemon.post("/quantd/keys", {"name": "laptop"}))[0] == 400
        assert (await daemon.post("/quantd/keys", {"name": "x", "scope": "root"}))[0] == 400
        listed = (await daemon.get("/quantd/keys"))[1]["keys"]
        assert [(key["name"], key["scope"]) for key in listed] == [("laptop", "infer")]
        assert added["key"] not in str(listed)
        async with daemon.over_port({"Authorization": f"Bearer {added['key']}"}) as session:
            async with session.post(CHAT, json=HI) as response:
                assert response.status == 200
            async with daemon.session.delete("http://x/quantd/keys/laptop") as response:
                assert response.status == 200
            async with session.post(CHAT, json=HI) as response:
                assert response.status == 200  # no keys are left, so none is needed
        async with daemon.session.delete("http://x/quantd/keys/laptop") as response:
            assert response.status == 404


@in_loop
async def test_users_of_the_socket_and_of_the_port_may_use_models_and_change_nothing(
    tmp_path: Path,
) -> None:
    """As the daemon sees a user who is not its owner."""
    uid = USERS[0] if CAN_SWITCH else os.geteuid()
    async with running_daemon(access=Access(KeyFile(tmp_path / "keys.json"), owner=NOBODY)) as daemon:
        for address in (daemon.path, daemon.port):
            answers = await ask_as(
                uid,
                address,
                ("POST", CHAT, HI),
                ("POST", "/quantd/unload", {"model": "tiny"}),
                ("POST", "/api/pull", {"model": "x"}),
                ("POST", "/quantd/stop", {}),
                ("GET", "/metrics", None),
            )
            assert [status for status, _ in answers] == [200, 403, 403, 403, 200]
            assert answers[1][1]["error"]["code"] == "not_allowed"
            assert f"uid:{uid} may use models" in answers[2][1]["error"]
        assert not daemon.engine.closed


@in_loop
async def test_the_owner_may_change_things_on_the_socket_and_on_the_port() -> None:
    async with running_daemon() as daemon, daemon.over_port() as session:
        for one, base in ((daemon.session, "http://x"), (session, "")):
            async with one.post(base + CHAT, json=HI) as response:
                assert response.status == 200
            async with one.post(base + "/quantd/unload", json={"model": "tiny"}) as response:
                assert response.status == 200


@in_loop
async def test_the_command_line_brings_its_key_over_tcp(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("a")
    async with running_daemon(access=Access(keys)) as daemon:
        address = ("127.0.0.1", daemon.port)
        with pytest.raises(DaemonError, match="QUANTD_KEY") as caught:
            await asyncio.to_thread(DaemonClient(address).get, "/quantd/status")
        assert caught.value.code == "invalid_api_key"
        assert await asyncio.to_thread(DaemonClient(address, key).get, "/quantd/status")
        with pytest.raises(DaemonError, match="key:a may use models"):
            await asyncio.to_thread(DaemonClient(address, key).delete, "/quantd/keys/a")


OWN = "http://127.0.0.1:{port}"


@pytest.mark.parametrize(
    ("headers", "reads", "changes"),
    [
        ({}, 200, 404),
        ({"Host": "localhost:1"}, 200, 404),
        ({"Host": "[::1]:80", "Origin": "http://localhost:3000"}, 200, 403),
        ({"Origin": OWN}, 200, 404),
        ({"Origin": "https://chat.example"}, 200, 403),
        ({"Origin": "vscode-webview://1a2b"}, 200, 403),
        ({"Host": "evil.example"}, 403, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403, 403),
        ({"Origin": "https://evil.example"}, 403, 403),
        ({"Origin": "null"}, 403, 403),
        ({"Sec-Fetch-Site": "cross-site"}, 403, 403),
        ({"X-Forwarded-For": "10.1.2.3"}, 200, 403),
        ({"Authorization": "Bearer x", "x-api-key": "y"}, 200, 404),
        ({"Authorization": "Basic eDp5"}, 200, 404),
    ],
)
def test_pages_of_other_sites(tmp_path: Path, headers: dict[str, str], reads: int, changes: int) -> None:
    async def ask() -> None:
        sites = Sites(origins=["https://chat.example"])
        access = Access(KeyFile(tmp_path / "keys.json"), sites=sites)
        async with running_daemon(access=access) as daemon, daemon.over_port() as session:
            sent = {name: value.format(port=daemon.port) for name, value in headers.items()}
            async with session.get("/v1/models", headers=sent) as response:
                assert response.status == reads, await response.text()
                shown = response.headers.get("Access-Control-Allow-Origin")
                assert shown == (sent.get("Origin") if reads == 200 else None)
                assert "Origin" in response.headers["Vary"]
            async with session.post("/quantd/unload", headers=sent, json={"model": "tiny"}) as response:
                assert response.status == changes, await response.text()
            # The same over the socket, which no page reaches.
            async with daemon.session.get("http://any-name/v1/models", headers=sent) as response:
                assert response.status == 200

    in_loop(ask)()


@in_loop
async def test_browsers_are_told_which_pages_may_ask() -> None:
    async with running_daemon() as daemon, daemon.over_port() as session:
        asked = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-stainless-os",
            "Access-Control-Request-Private-Network": "true",
        }
        async with session.options(CHAT, headers=asked | {"Origin": "http://localhost:3000"}) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "http://localhost:3000"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
            assert response.headers["Access-Control-Allow-Private-Network"] == "true"
        for foreign in (
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Origin": "http://[::1]", "Host": "x.y"},
        ):
            async with session.options(CHAT, headers=asked | foreign) as response:
                assert response.status == 403
                assert "Access-Control-Allow-Methods" not in response.headers


GENERATING = [
    (CHAT, {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/completions", {"prompt": "hi", "suffix": "there"}),
    ("/v1/fim/completions", {"prompt": "hi"}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/responses", {"input": "hi", "background": True}),
    ("/completion", {"prompt": "hi"}),
    ("/infill", {"input_prefix": "hi", "input_suffix": "x"}),
    ("/embedding", {"content": "hi"}),
    ("/api/chat", {"messages": [{"role": "user", "content": "hi"}], "stream": False}),
    ("/api/generate", {"prompt": "hi", "stream": False}),
    ("/api/embed", {"input": "hi"}),
    ("/api/embeddings", {"prompt": "hi"}),
]


@in_loop
async def test_prompts_of_unlike_clients_have_unlike_salts_on_every_surface(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    first, second = keys.add("first"), keys.add("second")
    async with running_daemon(access=Access(keys), tokens=QWEN_INFILL) as daemon:
        for path, fields in GENERATING:
            body = fields | {"model": "tiny", "max_tokens": 1, "n_predict": 1}
            salts = []
            async with daemon.over_port() as session:
                for headers in ({"Authorization": f"Bearer {first}"}, {"x-api-key": second}):
                    seen = len(daemon.engine.seen) if daemon.engines.started else 0
                    async with session.post(path, json=body, headers=headers) as response:
                        assert response.status == 200, await response.text()
                    await until_so(lambda seen=seen: len(daemon.engine.seen) > seen)
                    salts += [request.salt for request in daemon.engine.seen[seen:]]
            assert len(salts) == 2 and len(set(salts)) == 2, path
            assert [salt.split("\0")[0] for salt in salts] == ["key:first", "key:second"], path


@in_loop
async def test_a_salt_of_the_request_counts_within_its_client() -> None:
    async with running_daemon() as daemon:
        for salt in ("a", "a", "b", None, "a\0b"):
            await daemon.post(CHAT, HI | {"cache_salt": salt})
        me = f"uid:{os.geteuid()}"
        assert [request.salt for request in daemon.engine.seen] == [
            f"{me}\0{salt}" for salt in ("a", "a", "b", "", "a\0b")
        ]


@in_loop
async def test_nobody_sees_ends_or_removes_what_is_stored_for_another(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    other = {"Authorization": f"Bearer {keys.add('other')}"}
    async with running_daemon(access=Access(keys)) as daemon, daemon.over_port(other) as session:
        ask = {"model": "tiny", "input": "a secret", "max_output_tokens": 400}
        _, done = await daemon.post("/v1/responses", ask | {"max_output_tokens": 2})
        daemon.engine.gate.clear()
        _, running = await daemon.post("/v1/responses", ask | {"background": True})
        for id in (done["id"], running["id"]):
            for method, path in (
                ("GET", ""),
                ("GET", "/input_items"),
                ("POST", "/cancel"),
                ("DELETE", ""),
            ):
                async with session.request(method, f"/v1/responses/{id}{path}") as response:
                    assert response.status == 404
            async with session.post("/v1/responses", json=ask | {"previous_response_id": id}) as response:
                assert response.status == 400
        item = {"type": "item_reference", "id": done["output"][0]["id"]}
        async with session.post("/v1/responses", json=ask | {"input": [item]}) as response:
            assert response.status in (400, 404)
        assert (await daemon.get(f"/v1/responses/{running['id']}"))[1]["status"] == "in_progress"
        assert (await daemon.get(f"/v1/responses/{done['id']}"))[1]["status"] != "cancelled"
        assert (await daemon.post(f"/v1/responses/{running['id']}/cancel", {}))[1]["status"] == "cancelled"
        daemon.engine.gate.set()


@in_loop
async def test_slots_and_their_files_are_each_clients_own(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    other = {"Authorization": f"Bearer {keys.add('other')}"}
    async with running_daemon(access=Access(keys)) as daemon, daemon.over_port(other) as session:
        await daemon.post("/completion", {"prompt": "a secret", "n_predict": 1})
        file = {"filename": "chat.bin"}
        assert (await daemon.post("/slots/0?action=save", file))[0] == 200
        folder = daemon.path.parent / "state" / "slots"
        assert {path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())} == {0o700}
        for action in ("save", "restore"):
            async with session.post(f"/slots/0?action={action}", json=file) as response:
                assert response.status == 400, await response.text()
        async with session.post("/slots/0?action=erase", json={}) as response:
            assert (await response.json())["n_erased"] == 0
        assert daemon.engine.forgotten == [[]]
        assert (await daemon.post("/slots/0?action=restore", file))[1]["n_restored"] > 0
        for number in range(999):
            (folder / f"uid-{os.geteuid()}" / f"f{number}").touch()
        assert (await daemon.post("/slots/0?action=save", file))[0] == 200
        status, answer = await daemon.post("/slots/0?action=save", {"filename": "more.bin"})
        assert status == 400 and "1000 files" in answer["error"]["message"]
        assert (await daemon.post("/slots/0?action=erase", {}))[1]["n_erased"] > 0


@in_loop
async def test_sdks_know_a_wrong_key_and_a_missing_right(tmp_path: Path) -> None:
    """By their own classes of errors; Ollama's by its key in the environment, which it takes as others do."""
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("infer")
    messages = [{"role": "user", "content": "hi"}]

    def ask(base: str) -> None:
        for wrong in (True, False):
            text = "wrong" if wrong else key
            asked = openai.OpenAI(base_url=f"{base}/v1", api_key=text, max_retries=0)
            told = anthropic.Anthropic(base_url=base, api_key=text, max_retries=0)
            pulled = ollama.Client(base, headers={"Authorization": f"Bearer {text}"})
            with asked, told:
                if wrong:
                    with pytest.raises(openai.AuthenticationError, match="no longer"):
                        asked.chat.completions.create(model="tiny", messages=messages)
                    with pytest.raises(anthropic.AuthenticationError, match="no longer"):
                        told.messages.create(model="tiny", messages=messages, max_tokens=2)
                else:
                    assert asked.chat.completions.create(
                        model="tiny", messages=messages, max_tokens=2
                    ).choices
                    assert told.messages.create(model="tiny", messages=messages, max_tokens=2).content
                    assert pulled.chat("tiny", messages, options={"num_predict": 2}).done
                with pytest.raises(ollama.ResponseError) as caught:
                    pulled.pull("x")
                assert caught.value.status_code == (401 if wrong else 403)
                pulled.close()

    async with running_daemon(access=Access(keys)) as daemon:
        await asyncio.to_thread(ask, f"http://127.0.0.1:{daemon.port}")
