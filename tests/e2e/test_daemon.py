"""The daemon as users run it: `quantd serve`, an engine process, a model, and clients that come and go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import psutil
import pytest
from as_user import CAN_SWITCH, USERS, ask_as
from chromium import chromium, new_page
from homes import add_tiny, share_kernels
from processes import children_of
from waiting import PATIENCE, run_steadily, until

from quantd.daemon.store import Store

DATA = Path(__file__).parents[1] / "data"
STORY = [{"role": "user", "content": "Write the longest story you can."}]
CHAT = "/v1/chat/completions"


def case(name: str) -> dict[str, Any]:
    return json.loads((DATA / "cases" / f"{name}.json").read_text())["body"]


def wait_for_text(stream: Iterator[Any]) -> None:
    """Read the deltas of a chat until one has text, so that its engine has begun with it."""
    while not next(stream).choices[0].delta.content:
        pass


@dataclass
class Served:
    """A running `quantd serve` and its socket."""

    process: subprocess.Popen[bytes]
    path: Path

    def http(self) -> httpx2.Client:
        return httpx2.Client(
            transport=httpx2.HTTPTransport(uds=str(self.path)), base_url="http://x", timeout=PATIENCE
        )

    def url(self) -> str:
        """Its address over TCP."""
        with self.http() as http:
            return next(name for name in http.get("/quantd/status").json()["listening"] if "http" in name)

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url="http://x/v1", api_key="x", http_client=self.http(), max_retries=0)

    def post(self, path: str, body: object) -> tuple[int, Any]:
        with self.http() as http:
            response = http.post(path, json=body)
            return response.status_code, response.json()

    def complete(self, body: dict[str, Any]) -> Any:
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return answer

    def stats(self) -> dict[str, int]:
        with self.http() as http:
            (model,) = http.get("/quantd/status").json()["models"]
        return model["stats"] | {
            "blocks_unheld": model["stats"]["blocks_free"] + model["stats"]["blocks_cached"]
        }

    def wait_idle(self) -> None:
        def idle() -> bool:
            stats = self.stats()
            return (
                not stats["num_running"] + stats["num_waiting"]
                and stats["blocks_unheld"] == stats["blocks_total"]
            )

        until(idle, "no request holds a block")

    def num_waiting(self) -> int:
        """Requests that no step has taken up: all that come while the engine is suspended."""
        with self.http() as http:
            (model,) = http.get("/quantd/status").json()["models"]
        return len(model["waiting"])

    def said(self) -> str:
        """Its log so far."""
        return (self.path.parent / "log").read_text()

    def engine(self) -> psutil.Process:
        (engine,) = children_of(psutil.Process(self.process.pid), "quantd.engine.loop")
        return engine

    def send(self, body: dict[str, Any]) -> socket.socket:
        """A raw connection with a chat request on it."""
        data = json.dumps(body).encode()
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(str(self.path))
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: any\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        connection.sendall(head.encode() + data)
        return connection


@contextlib.contextmanager
def serve(home: Path, model: str, *flags: str) -> Iterator[Served]:
    """Start a daemon, have it load the model, end whatever is left of it.

    One thread: another test runs on the next core.
    """
    share_kernels(home)
    folder = Path(tempfile.mkdtemp(dir=home))
    path = folder / "api.sock"
    command = [sys.executable, "-P", "-m", "quantd.daemon.cli.main", "serve", "--socket", str(path)]
    with (folder / "log").open("wb") as output:
        process = subprocess.Popen(
            [*command, "--port", "0", "--threads", "1", "--model", model, *flags],
            stderr=output,
            env=os.environ | {"QUANTD_HOME": str(home)},
        )
    served = Served(process, path)
    try:
        until(lambda: "READY" in served.said() or process.poll() is not None, "READY")
        assert process.poll() is None, served.said()
        served.complete({"model": model, "prompt": [40], "max_tokens": 1})
        yield served
    finally:
        children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.kill()
        process.wait()
        _, left = psutil.wait_procs(children, timeout=PATIENCE)
        assert not left, served.said()


@pytest.fixture(scope="module")
def tiny_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tiny(tmp_path_factory.mktemp("home"), "tiny")


@pytest.fixture(scope="module")
def served(tiny_home: Path) -> Iterator[Served]:
    with serve(tiny_home, "tiny", "--kv-memory", "32MiB", "--max-num-tokens", "64", "--port", "0") as daemon:
        yield daemon


def test_stream_equals_reply(served: Served) -> None:
    with served.client() as client:
        whole = client.chat.completions.create(model="tiny", messages=STORY, max_tokens=40, seed=3)
        stream = client.chat.completions.create(
            model="tiny",
            messages=STORY,
            max_tokens=40,
            seed=3,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0


def test_the_daemon_process_has_no_torch(served: Served) -> None:
    maps = Path(f"/proc/{served.process.pid}/maps").read_text()
    assert "torch" not in maps and "numpy" not in maps
    assert "torch" in Path(f"/proc/{served.engine().pid}/maps").read_text()


@pytest.mark.parametrize("length", [63, 64, 65])
def test_prompt_logprobs_do_not_depend_on_the_cache(served: Served, length: int) -> None:
    """Case c15."""
    ids = (case("c15")["prompt"] + [7])[:length]
    scored = case("c15") | {"prompt": ids, "cache_salt": f"c15-{length}"}
    plain = {name: value for name, value in scored.items() if name not in ("logprobs", "echo")}
    cold = served.complete(scored)
    served.complete(plain)
    warm = served.complete(scored)
    for reply in (cold, warm):
        logprobs = reply["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == length + 1
        assert logprobs["token_logprobs"][0] is None and all(
            value < 0 for value in logprobs["token_logprobs"][1:]
        )
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] <= length - 1
    columns = [reply["choices"][0]["logprobs"]["token_logprobs"][1:] for reply in (cold, warm)]
    assert columns[0] == pytest.approx(columns[1], abs=1e-3)
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]


def test_cached_prompts_give_the_same_text(served: Served) -> None:
    """Case c15b."""
    body = case("c15b") | {"cache_salt": "c15b"}
    cold, warm = served.complete(body), served.complete(body)
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert 0 < warm["usage"]["prompt_tokens_details"]["cached_tokens"] <= 63
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    fork = body | {"prompt": body["prompt"][:40] + list(range(30, 54))}
    shared, alone = served.complete(fork), served.complete(fork | {"cache_salt": "alone"})
    assert shared["usage"]["prompt_tokens_details"]["cached_tokens"] == 32
    assert shared["choices"][0]["text"] == alone["choices"][0]["text"]


def test_each_clients_prompts_are_cached_for_it_alone(served: Served) -> None:
    """The daemon's owner, another user at the port where this process may become one, and a key's holder."""
    body = {"model": "tiny", "prompt": [3 + i * i % 89 for i in range(100)], "max_tokens": 1}
    with served.http() as http:
        port = int(http.get("/quantd/status").json()["listening"][1].rpartition(":")[2])

    def cached(reply: dict[str, Any]) -> int:
        return reply["usage"]["prompt_tokens_details"]["cached_tokens"]

    def as_other() -> int:
        ((status, reply),) = asyncio.run(ask_as(USERS[0], port, ("POST", "/v1/completions", body)))
        assert status == 200, reply
        return cached(reply)

    def with_key() -> int:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=PATIENCE) as http:
            return cached(http.post("/v1/completions", json=body).json())

    found = [cached(served.complete(body)), *([as_other()] if CAN_SWITCH else [])]
    key = served.post("/quantd/keys", {"name": "laptop"})[1]["key"]
    found.append(with_key())
    assert found == [0] * len(found)
    assert with_key() == 96
    with served.http() as http:
        assert http.delete("/quantd/keys/laptop").status_code == 200
    assert cached(served.complete(body)) == 96
    assert cached(served.complete(body | {"cache_salt": "x"})) == 0
    if CAN_SWITCH:
        assert as_other() == 96


def test_a_saved_prompt_is_cached_again_once_it_is_restored(served: Served) -> None:
    body = {"prompt": [20 + i * i % 97 for i in range(200)], "n_predict": 1, "id_slot": 1}

    def cached() -> int:
        status, reply = served.post("/completion", body)
        assert status == 200, reply
        return reply["tokens_cached"]

    assert (cached(), cached()) == (0, 192)
    assert served.post("/slots/1?action=save", {"filename": "a.bin"})[1]["n_saved"] == 200
    for action in ("erase", "restore"):
        assert served.post("/slots/1?action=erase", {})[1]["n_erased"] == 200
        if action == "restore":
            assert served.post("/slots/1?action=restore", {"filename": "a.bin"})[1]["n_restored"] == 200
        assert cached() == (192 if action == "restore" else 0)


def test_the_steps_of_a_long_prompt_are_told(served: Served) -> None:
    body = {"prompt": [30 + i * i % 89 for i in range(200)], "n_predict": 1}
    body |= {"stream": True, "return_progress": True, "cache_prompt": False}
    with served.http() as http:
        frames = http.post("/completion", json=body).text.split("\n\n")
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames if frame.startswith("data: ")]
    told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
    assert [progress["processed"] for progress in told] == [64, 128, 192, 200]
    assert {(progress["total"], progress["cache"]) for progress in told} == {(200, 0)}


def test_choices_and_seeds(served: Served) -> None:
    body = case("c12c") | {"max_tokens": 8}
    choices = served.complete(body)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    alone = [served.complete(body | {"prompt": ids, "n": 1})["choices"][0]["text"] for ids in body["prompt"]]
    assert [choice["text"] for choice in choices] == [alone[0], alone[0], alone[1], alone[1]]
    drawn = {"prompt": [40, 41], "max_tokens": 12, "seed": 5, "n": 3}
    first, second = served.complete(drawn)["choices"], served.complete(drawn)["choices"]
    assert first == second and len({choice["text"] for choice in first}) > 1


def test_bad_numbers_disturb_nobody(served: Served) -> None:
    """Cases c10 and c12, beside a stream."""
    with served.client() as client:
        body = {"model": "tiny", "messages": STORY, "max_tokens": 300, "seed": 1}
        alone = client.chat.completions.create(**body).choices[0].message.content
        stream = client.chat.completions.create(**body, stream=True)
        parts = [next(stream).choices[0].delta.content]
        for name, path in (
            ("c10", CHAT),
            ("c10c", CHAT),
            ("c12", "/v1/completions"),
            ("c12b", "/v1/completions"),
        ):
            assert served.post(path, case(name))[0] == 400
        assert served.post("/v1/completions", case("c10b"))[0] == 200
        parts += [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(parts) == alone


def test_overflow_is_refused_with_both_numbers(served: Served) -> None:
    status, answer = served.post("/v1/completions", {"prompt": [40] * 9000})
    assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
    assert (
        answer["error"]["n_prompt_tokens"] == 9000
        and str(answer["error"]["n_ctx"]) in answer["error"]["message"]
    )


def test_what_outgrows_the_pool_is_refused_and_others_are_served(tiny_home: Path) -> None:
    """Case c17: a pool of 32 blocks of 16 tokens."""
    with serve(tiny_home, "tiny", "--max-model-len", "2048", "--kv-memory", str(512 * 320)) as daemon:
        assert daemon.stats()["blocks_total"] == 32
        status, answer = daemon.post("/v1/completions", case("c17"))
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert "800" in answer["error"]["message"] and "KV cache" in answer["error"]["message"]
        assert daemon.complete({"prompt": [40] * 10, "max_tokens": 2})["usage"]["completion_tokens"] == 2
        ids = case("c17")["prompt"][:400]
        grown = daemon.complete({"prompt": ids, "max_tokens": 400, "ignore_eos": True})
        assert grown["choices"][0]["finish_reason"] == "length"
        assert grown["usage"]["total_tokens"] == 512
        daemon.wait_idle()


@pytest.mark.parametrize("changes", [{"stream": False}, {"stream": True}, {"n": 4}])
@pytest.mark.parametrize("prompt_len", [10, 6000], ids=["decode", "prefill"])
def test_leaving_frees_everything(served: Served, changes: dict[str, Any], prompt_len: int) -> None:
    """Case c13."""
    served.wait_idle()
    messages = [{"role": "user", "content": "a" * prompt_len}]
    body = case("c13") | {"max_tokens": 8000 - prompt_len, "messages": messages}
    connection = served.send(body | changes)
    until(lambda: served.stats()["num_running"] + served.stats()["num_waiting"] > 0, "the request runs")
    connection.close()
    served.wait_idle()
    generated = served.stats()["generated_tokens"]
    time.sleep(0.1)
    assert served.stats()["generated_tokens"] == generated


def descriptors(processes: Sequence[psutil.Process]) -> list[int]:
    return [process.num_fds() for process in processes]


def no_more(now: Sequence[int], before: Sequence[int]) -> bool:
    """Whether each count is at most what it was; helpers that end when they are idle take theirs along."""
    return all(count <= old for count, old in zip(now, before, strict=True))


def test_fifty_clients_that_leave_leave_nothing(served: Served) -> None:
    served.wait_idle()
    processes = [psutil.Process(served.process.pid), served.engine()]
    before = descriptors(processes)
    aborts = served.stats()["aborts"]
    for number in range(50):
        body = case("c13") | {"max_tokens": 1500, "stream": number % 2 == 0, "n": 1 + number % 3}
        connection = served.send(body)
        if number == 49:
            until(lambda: served.stats()["num_running"] > 0, "the last one's runs")
        time.sleep(0.01 * (number % 5))
        connection.close()
    served.wait_idle()
    until(lambda: no_more(descriptors(processes), before), "descriptors are as before")
    assert served.stats()["aborts"] > aborts
    assert served.complete({"prompt": [40], "max_tokens": 3})["usage"]["completion_tokens"] == 3


def test_a_killed_engine_is_told_and_replaced(served: Served) -> None:
    with served.client() as client:
        stream = client.chat.completions.create(
            model="tiny", messages=STORY, max_tokens=8000, stream=True, extra_body={"ignore_eos": True}
        )
        wait_for_text(stream)
        old = served.engine()
        old.kill()
        with pytest.raises(openai.APIError, match="engine"):
            list(stream)
        assert client.completions.create(model="tiny", prompt=[40], max_tokens=2).usage.completion_tokens == 2
    assert served.engine().pid != old.pid


def test_the_form_of_an_answer_in_ollamas_words(served: Served) -> None:
    values = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    schema = {"type": "object", "properties": {"flags": values}, "required": ["flags"]}
    body = {"model": "tiny", "messages": STORY, "format": schema | {"additionalProperties": False}}
    with served.http() as http:
        reply = http.post("/api/chat", json=body | {"options": {"num_predict": 60}})
    lines = [json.loads(line) for line in reply.text.splitlines()]
    flags = json.loads("".join(line["message"]["content"] for line in lines))["flags"]
    assert lines[-1]["done_reason"] == "stop" and [type(flag) for flag in flags] == [bool, bool]


def test_letting_a_model_go_gives_its_memory_back(served: Served) -> None:
    engine = served.engine()
    status, reply = served.post("/api/generate", {"model": "tiny", "keep_alive": 0})
    assert (status, reply["done_reason"]) == (200, "unload")
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
    options = {"num_predict": 8, "temperature": 0}
    body = {"model": "tiny", "messages": STORY, "stream": False, "options": options, "keep_alive": -1}
    status, reply = served.post("/api/chat", body)
    assert status == 200 and reply["eval_count"] == 8 and reply["load_duration"] > 10**6
    assert served.engine().pid != engine.pid
    _, openai_reply = served.post(
        CHAT, {"model": "tiny", "messages": STORY, "max_tokens": 8, "temperature": 0}
    )
    choice = openai_reply["choices"][0]["message"]
    assert choice["content"] == reply["message"]["content"]
    assert openai_reply["usage"]["prompt_tokens"] == reply["prompt_eval_count"]


def test_sigterm_lets_requests_finish(tiny_home: Path) -> None:
    with serve(tiny_home, "tiny", "--kv-memory", "32MiB") as daemon:
        engine = daemon.engine()
        replies: list[tuple[int, Any]] = []
        body = case("c13") | {"max_tokens": 600}
        asking = threading.Thread(target=lambda: replies.append(daemon.post(CHAT, body)))
        engine.suspend()
        asking.start()
        until(lambda: daemon.num_waiting() == 1, "the request is there")
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping: " in daemon.said(), "it stops")
        engine.resume()
        asking.join(PATIENCE)
        assert replies[0][0] == 200 and replies[0][1]["usage"]["completion_tokens"] == 600
        assert daemon.process.wait(PATIENCE) == 0
        until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, "the engine ends")
        assert not daemon.path.exists()


def test_sigterm_ends_what_outlasts_the_drain_in_the_stated_time(tiny_home: Path) -> None:
    with serve(tiny_home, "tiny", "--kv-memory", "32MiB", "--drain-seconds", "1") as daemon:
        engine = daemon.engine()
        with daemon.client() as client:
            extra = {"ignore_eos": True}
            stream = client.chat.completions.create(
                model="tiny", messages=STORY, max_tokens=8000, stream=True, extra_body=extra
            )
            next(stream)
            engine.suspend()
            started = time.monotonic()
            daemon.process.send_signal(signal.SIGTERM)
            with pytest.raises(openai.APIError, match="closed"):
                list(stream)
        assert daemon.process.wait(PATIENCE) == 0
        assert time.monotonic() - started < 1 + 10
        assert not engine.is_running()


def test_an_engine_that_hangs_in_a_step_is_ended_and_replaced(tiny_home: Path) -> None:
    with serve(tiny_home, "tiny", "--kv-memory", "32MiB", "--hang-seconds", "2") as daemon:
        with daemon.client() as client:
            extra = {"ignore_eos": True}
            stream = client.chat.completions.create(
                model="tiny", messages=STORY, max_tokens=8000, stream=True, extra_body=extra
            )
            wait_for_text(stream)
            old = daemon.engine()
            old.suspend()
            with pytest.raises(openai.APIError, match=r"stood still for 2 s \(see --hang-seconds\)"):
                list(stream)
        assert daemon.complete({"model": "tiny", "prompt": [40], "max_tokens": 2})["usage"]
        assert daemon.engine().pid != old.pid and not old.is_running()


def test_a_second_signal_ends_it_now(tiny_home: Path) -> None:
    with serve(tiny_home, "tiny", "--kv-memory", "32MiB") as daemon:
        engine = daemon.engine()
        engine.suspend()
        connection = daemon.send(case("c13") | {"stream": True})
        until(lambda: daemon.num_waiting() == 1, "the request is there")
        daemon.process.send_signal(signal.SIGTERM)
        until(lambda: "stopping: " in daemon.said(), "it stops")
        assert daemon.process.poll() is None
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(PATIENCE) == 1
        connection.close()
        assert not engine.is_running()


def test_an_engine_does_not_outlive_a_killed_daemon(tiny_home: Path) -> None:
    with serve(tiny_home, "tiny", "--kv-memory", "32MiB") as daemon:
        engine = daemon.engine()
        daemon.process.kill()
        daemon.process.wait()
        until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, "the engine ends")


def check_other_surfaces(daemon: Served, chat: openai.types.chat.ChatCompletion) -> None:
    """The same question by Responses and by Anthropic's messages: the same tokens in, the same words out."""
    question = "What is the capital of France?"
    with daemon.client() as client:
        response = client.responses.create(
            model="smollm2", input=question, temperature=0, max_output_tokens=20
        )
    with anthropic.Anthropic(base_url="http://x", api_key="x", http_client=daemon.http()) as client:
        message = client.messages.create(
            model="smollm2",
            messages=[{"role": "user", "content": question}],
            max_tokens=20,
            extra_body={"temperature": 0},
        )
    assert response.output_text == message.content[0].text == chat.choices[0].message.content
    counts = {response.usage.input_tokens, message.usage.input_tokens, chat.usage.prompt_tokens}
    assert len(counts) == 1 and (response.status, message.stop_reason) == ("completed", "end_turn")


def test_a_small_real_model_answers(smollm2: Path, tmp_path: Path) -> None:
    Store(tmp_path / "models").import_path(smollm2, "smollm2")
    with serve(tmp_path, "smollm2", "--kv-memory", "256MiB") as daemon, daemon.client() as client:
        question = [{"role": "user", "content": "What is the capital of France?"}]
        answer = client.chat.completions.create(
            model="smollm2", messages=question, temperature=0, max_tokens=20
        )
        assert "Paris" in (answer.choices[0].message.content or "")
        assert answer.choices[0].finish_reason == "stop"
        check_other_surfaces(daemon, answer)
        body = case("c35") | {"stream": False}
        echoed = daemon.complete(body)["choices"][0]["text"]
        assert echoed == "one two three" + daemon.complete(body | {"echo": False})["choices"][0]["text"]


# A model of random weights ends its answer at any token: what the page sends asks it not to.
ENDLESS = """
const sent = window.fetch;
const endless = (body) => JSON.stringify({...JSON.parse(body), ignore_eos: true});
window.fetch = (url, options) =>
  sent(url, options?.body ? {...options, body: endless(options.body)} : options);
"""


def test_the_page_chats_shows_the_pool_and_ends_what_it_began(served: Served, tmp_path: Path) -> None:
    async def use(browser: str) -> None:
        pool = "document.querySelectorAll('#engines canvas')[1]?.toDataURL()"
        async with new_page(browser) as page:
            await page.open(f"{served.url()}/#activity")
            await page.until("document.querySelector('#engines h2')?.innerText === 'tiny'")
            await page.evaluate(ENDLESS)
            before = await page.evaluate(pool)
            await page.evaluate("void (location.hash = 'chat')")
            await page.until("document.querySelector('#model').value === 'tiny'")
            await page.click("#prompt")
            await page.type("Write the longest story you can.")
            await page.press("Enter")
            length = "document.querySelector('.answer > .md')?.textContent.length ?? 0"
            await page.until(f"{length} > 20")
            seen = await page.evaluate(length)
            await page.until(f"{length} > {seen}")  # it streams
            await page.evaluate("void (location.hash = 'activity')")
            await page.until("document.querySelectorAll('#requests li').length === 1")
            await page.until(f"{pool} !== {json.dumps(before)}")
            await page.evaluate("void (location.hash = 'chat')")
            await page.press("Escape")
            await page.until("document.querySelector('.answer .usage').textContent.includes('stopped')")
            assert not page.complaints

    with chromium(tmp_path / "chromium") as browser:
        run_steadily(use(browser))
    served.wait_idle()
