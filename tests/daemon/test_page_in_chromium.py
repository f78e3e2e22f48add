"""The page as people use it: a real Chromium, the real daemon, and an engine that says what a test wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from chromium import Page, chromium, new_page, skip_without_chromium
from daemon_in_loop import Daemon, in_loop, running_daemon
from fake_models import CHATML, chat_tokenizer

from quantd.daemon.access.keys import KeyFile
from quantd.daemon.access.policy import Access
from quantd.daemon.errors import StoreError
from quantd.daemon.library import Library
from quantd.daemon.library_worker import Job, Step
from quantd.engine.errors import CapacityError
from quantd.engine.request import Request

skip_without_chromium(whole_module=True)

LAST = "#messages > .answer:last-child"
HOSTILE = (
    "<script>window.taken = 1</script><img src=x onerror='window.taken = 1'>\n\n"
    "![image](http://example.com/i.png) [link](javascript:window.taken=1)\n\n"
    "```html\n<b onclick='x()'>bold</b>\n```\n\n| <i>a</i> | b |\n|---|---|\n| <u>1</u> | 2 |"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


def saying(text: str) -> Callable[[Request], Sequence[int]]:
    """A model that says this, then ends."""
    ids = chat_tokenizer().encode(text, add_special_tokens=False).ids
    return lambda _: [*ids, 2]


class Tap:
    """In place of an engine's gate: lets through so many steps as it is told."""

    def __init__(self) -> None:
        self._steps = asyncio.Semaphore(0)

    async def wait(self) -> None:
        await self._steps.acquire()

    def let(self, steps: int) -> None:
        for _ in range(steps):
            self._steps.release()


async def tapped(daemon: Daemon) -> Tap:
    """Load the model, and hold its steps."""
    await daemon.service.load("tiny")
    daemon.engine.gate = tap = Tap()
    return tap


@contextlib.asynccontextmanager
async def page_of(daemon: Daemon, browser: str, view: str = "chat", **look: Any) -> AsyncIterator[Page]:
    """The page of a daemon. It asks no other host, and neither it nor the browser complains."""
    origin = f"http://127.0.0.1:{daemon.port}/"
    async with new_page(browser) as page:
        await page.look(**look)
        await page.open(f"{origin}#{view}")
        yield page
        assert not page.complaints
        assert [url for url in page.requests if not url.startswith((origin, "data:"))] == []


async def ask(page: Page, text: str) -> None:
    """Send a message by the keyboard."""
    await page.until("document.querySelector('#model').value !== ''")
    await page.evaluate("document.querySelector('#prompt').focus()")
    await page.type(text)
    await page.press("Enter")


async def answered(page: Page) -> str:
    """The text of the last answer once it has ended."""
    await page.until(f"document.querySelector('{LAST} .tools:not([hidden])') !== null")
    return await page.text(LAST)


@in_loop
async def test_an_answer_streams_and_stays(browser: str) -> None:
    async with running_daemon(saying("One **two** three.")) as daemon, page_of(daemon, browser) as page:
        tap = await tapped(daemon)
        await ask(page, "Count.")
        await page.until(f"document.querySelector('{LAST} .waiting') !== null")
        tap.let(7)
        await page.until(f"document.querySelector('{LAST} > .md').innerText.startsWith('One')")
        assert "three" not in await page.text(LAST)
        tap.let(600)
        said = await answered(page)
        assert "One two three." in said and "tokens in" in said and "out" in said and "first after" in said
        assert await page.evaluate(f"document.querySelector('{LAST} strong').textContent") == "two"
        assert "three." in await page.text("#status")  # what a screen reader is told
        await page.reload()
        await page.until(f"document.querySelector('{LAST}')?.innerText.includes('One two three.')")
        assert await page.text("#chats li") == "Count."


@pytest.mark.parametrize("way", ["button", "Escape", "delete"])
@in_loop
async def test_a_stopped_answer_ends_its_request(browser: str, way: str) -> None:
    async with running_daemon() as daemon, page_of(daemon, browser) as page:
        tap = await tapped(daemon)
        await ask(page, "A long story")
        tap.let(9)
        await page.until(f"document.querySelector('{LAST} > .md').innerText !== ''")
        assert len(daemon.engine.running) == 1
        if way == "Escape":
            await page.press("Escape")
        else:
            await page.click("#stop" if way == "button" else "#chats .delete")
        await daemon.settle()
        assert len(daemon.engine.aborted) == 1
        if way == "delete":
            assert await page.evaluate("document.querySelectorAll('#messages li').length") == 0
            await page.click("#toast button")  # undo
        assert "stopped" in await answered(page)
        assert await page.evaluate("document.activeElement.id") == "prompt"


@in_loop
async def test_the_keyboard_is_enough(browser: str) -> None:
    async with running_daemon(saying("Yes.")) as daemon, page_of(daemon, browser) as page:
        await page.until("document.querySelector('#model').value !== ''")
        first = "document.querySelector('a, button, input, select, textarea, [tabindex]')"
        await page.evaluate(f"{first}.focus()")
        assert await page.evaluate("document.activeElement.className") == "skip"
        await page.press("Enter")
        await page.until("document.activeElement.id === 'prompt'")
        await page.type("one")
        await page.press("Enter", shift=True)
        await page.type("two")
        await page.press("Enter")
        assert "Yes." in await answered(page)
        assert await page.evaluate("document.querySelector('.user .text').textContent") == "one\ntwo"
        order = []
        await page.evaluate("document.querySelector('nav a').focus()")
        for _ in range(13):
            await page.press("Tab")
            order.append(
                await page.evaluate("(n => n.id || n.innerText || n.ariaLabel)(document.activeElement)")
            )
        assert order[:5] == ["Models", "Activity", "theme", "new-chat", "one two"]
        assert order[5:8] == ["Delete one two", "model", "options-button"]
        assert order[8:] == ["log", "Copy", "Copy", "Try again", "prompt"]


@in_loop
async def test_what_a_model_says_is_text(browser: str) -> None:
    template = CHATML + "<think></think>"
    said = f"<think>{HOSTILE[:87]}\n\n```\n1\n```</think>{HOSTILE}"
    async with running_daemon(saying(said), template) as daemon, page_of(daemon, browser) as page:
        await ask(page, "<b>Hi</b>")
        assert "Answer:" in (text := await answered(page))
        assert "<script>window.taken = 1</script><img src=x onerror='window.taken = 1'>" in text
        assert "[link](javascript:window.taken=1)" in text and "<b onclick='x()'>bold</b>" in text
        assert not await page.evaluate(f"document.querySelector('{LAST} details').open")
        await page.click(f"{LAST} summary")
        await page.until(f"document.querySelector('{LAST} details figure') !== null")
        made = await page.evaluate(
            "[...new Set([...document.querySelectorAll('#messages *')].map(node => node.localName))].sort()"
        )
        assert not {"script", "img", "b", "i", "u"} & {*made} and {"table", "th", "td", "pre", "a"} <= {*made}
        assert await page.evaluate("window.taken") is None
        links = "[...document.querySelectorAll('#messages a')].map(link => [link.href, link.rel].join(' '))"
        assert set(await page.evaluate(links)) == {"http://example.com/i.png noopener noreferrer"}
        await page.click(f"{LAST} > .md figure button")
        await page.until(f"document.querySelector('{LAST} > .md figure button').innerText === 'Copied'")
        assert await page.evaluate("navigator.clipboard.readText()") == "<b onclick='x()'>bold</b>"


@in_loop
async def test_conversations_go_side_by_side(browser: str) -> None:
    async with running_daemon(saying("Fine.")) as daemon, page_of(daemon, browser) as page:
        tap = await tapped(daemon)
        await ask(page, "First")
        await page.click("#new-chat")
        await ask(page, "Second")
        await page.until(lambda: len(daemon.engine.running) == 2)
        tap.let(100)
        assert "Fine." in await answered(page)
        await daemon.settle()
        titles = "[...document.querySelectorAll('#chats .open')].map(node => node.textContent)"
        assert sorted(await page.evaluate(titles)) == ["First", "Second"]
        await page.click("#chats .open:not([aria-current])")
        assert await page.text(".user .text") == "First" and "Fine." in await answered(page)


@in_loop
async def test_options_reach_the_engine(browser: str) -> None:
    async with running_daemon(saying("Fine.")) as daemon, page_of(daemon, browser) as page:
        await page.click("#options-button")
        for field, value in (("system", "Be brief."), ("temperature", "0.3"), ("max-tokens", "7")):
            await page.click(f"#{field}")
            await page.type(value)
        await page.press("Escape")
        await ask(page, "Hi")
        await answered(page)
        (request,) = daemon.engine.seen
        assert (request.sampling.temperature, request.sampling.max_tokens) == (0.3, 7)
        assert "system\nBe brief." in chat_tokenizer().decode(request.prompt, skip_special_tokens=False)
        assert await page.text("#options-button") == "Options (3)"


@in_loop
async def test_faults_are_told_in_words(browser: str) -> None:
    async with running_daemon(saying("Better.")) as daemon, page_of(daemon, browser) as page:
        daemon.engines.failures.append(CapacityError("12 GB are needed and 8 GB are free"))
        await ask(page, "Hi")
        assert "12 GB are needed and 8 GB are free" in await answered(page)
        await page.click(f"{LAST} .tools button:last-child")  # try again
        await page.until(f"document.querySelector('{LAST}').innerText.includes('Better.')")
        await ask(page, "word " * 600)
        said = await answered(page)
        assert "context length is 512" in said
        await page.send(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )
        await page.click(f"{LAST} .tools button:last-child")
        await page.until("document.querySelector('#banner:not([hidden])') !== null")
        assert "does not answer" in await page.text("#banner") and "not connected" in await page.text(
            "#pulse"
        )


@in_loop
async def test_models_are_loaded_and_unloaded(browser: str) -> None:
    async with running_daemon() as daemon, page_of(daemon, browser, "models") as page:
        daemon.engines.release = asyncio.Event()
        await page.until("document.querySelector('#models h3') !== null")
        assert (await page.text("#models li")).split("\n")[:2] == ["tiny", "on disk"]
        await page.click("[aria-label='Load tiny']")
        await page.until("document.querySelector('#models .chip').innerText === 'loading, 100 %'")
        assert await page.evaluate("document.querySelector('#models progress').position") == 1
        daemon.engines.release.set()
        await page.until("document.querySelector('#models .chip').innerText === 'in memory'")
        await page.click("[aria-label='Pin tiny']")
        await page.until("document.querySelector('#models').innerText.includes('stays in memory')")
        await page.click("[aria-label='Unpin tiny']")
        await page.until("!document.querySelector('#models').innerText.includes('stays in memory')")
        await page.click("[aria-label='Unload tiny']")
        await page.until("document.querySelector('#models .chip').innerText === 'on disk'")
        assert daemon.engine.closed
        daemon.engines.failures.append(CapacityError("no room for it"))
        await page.click("[aria-label='Load tiny']")
        await page.until("document.querySelector('#models .error').innerText === 'no room for it'")
        await page.reload()
        for _ in range(3):
            await daemon.service.load("tiny")
            daemon.engine.died.set_result("killed by signal 9")
            await asyncio.sleep(0)
        await page.until("document.querySelector('#models .error')?.innerText.includes('killed by signal 9')")


@in_loop
async def test_a_model_is_deleted_by_who_is_sure(browser: str) -> None:
    async with running_daemon() as daemon, page_of(daemon, browser, "models") as page:
        await page.until("document.querySelector('#models h3') !== null")
        await page.click("#models .icon")
        assert "Delete tiny" in await page.text("dialog[open]")
        await page.press("Escape")
        await page.until("document.querySelector('dialog[open]') === null")
        assert daemon.store.list()
        await page.click("#models .icon")
        await page.click("dialog[open] .main")
        await page.until("document.querySelector('#models h3') === null")
        assert not daemon.store.list() and "No model is here yet" in await page.text("#models")


@in_loop
async def test_a_pull_shows_how_far_it_is(browser: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: asyncio.Queue[Step | None] = asyncio.Queue()
    ended = asyncio.Event()

    async def add(library: Library, job: Job) -> AsyncGenerator[Step]:
        try:
            while (step := await reports.get()) is not None:
                yield step
            raise StoreError("the hub says no")
        finally:
            ended.set()

    monkeypatch.setattr(Library, "add", add)
    async with running_daemon() as daemon, page_of(daemon, browser, "models") as page:
        await page.click("#source")
        await page.type("smollm2")
        await page.press("Enter")
        reports.put_nowait(Step("downloading", 25_000_000, 100_000_000))
        await page.until("document.querySelector('#pulls')?.innerText.includes('25 MB of 100 MB')")
        assert await page.evaluate("document.querySelector('#pulls progress').position") == 0.25
        await page.click("#pulls button")  # cancel
        await ended.wait()
        await page.until("document.querySelector('#pulls li') === null")
        await page.click("#source")
        await page.type("smollm2")
        await page.press("Enter")
        reports.put_nowait(None)
        await page.until("document.querySelector('#pulls .error')?.innerText === 'the hub says no'")


@in_loop
async def test_activity_shows_requests_and_ends_them(browser: str) -> None:
    async with running_daemon() as daemon, page_of(daemon, browser, "activity") as page:
        await tapped(daemon)
        await page.until("document.querySelector('#engines canvas')?.getAttribute('aria-label') != null")
        seen = "document.querySelectorAll('#engines canvas')[1].toDataURL()"
        await page.until("document.querySelector('#engines').innerText.includes('1\\u202f024 tokens free')")
        before = await page.evaluate(seen)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
        asking = asyncio.create_task(daemon.post("/v1/chat/completions", body))
        await page.until("document.querySelector('#requests li') !== null")
        assert "POST /v1/chat/completions" in await page.text("#requests li")
        assert await page.evaluate(seen) != before
        await page.click("#requests button")
        status, answer = await asking
        assert status == 410 and "cancelled" in answer["error"]["message"]
        await page.until("document.querySelector('#requests li') === null")
        assert not daemon.engine.running


@in_loop
async def test_a_key_is_asked_for_and_its_scope_is_told(browser: str, tmp_path: Path) -> None:
    keys = KeyFile(tmp_path / "keys.json")
    key = keys.add("page")
    async with running_daemon(saying("Fine."), access=Access(keys)) as daemon:
        async with page_of(daemon, browser) as page:
            for given in ("a-wrong-one", key):
                await page.until("document.querySelector('dialog[open]') !== null")
                title = await page.text("#key-title")
                await page.type(given)
                await page.press("Enter")
            assert title == "The daemon does not know this API key"
            await page.until("document.querySelector('#pulse.well') !== null")
            await ask(page, "Hi")
            assert "Fine." in await answered(page)
            await page.reload()
            assert await page.evaluate("document.querySelector('dialog[open]')") is None
            await page.evaluate("void (location.hash = 'models')")
            await page.until("document.querySelector('#models .chip')?.innerText === 'in memory'")
            await page.click("[aria-label='Unload tiny']")
            await page.until(
                "document.querySelector('#models .error').innerText.includes('key:page may use')"
            )
        async with page_of(daemon, browser) as page:
            await page.press("Escape")
            await page.until("document.querySelector('#banner:not([hidden])') !== null")
            await page.click("#banner button")
            await page.until("document.querySelector('dialog[open]') !== null")


FAULTS_OF_LAYOUT = """
(() => {
  const width = document.documentElement.clientWidth, faults = [];
  if (document.documentElement.scrollWidth > width) faults.push("the page scrolls sideways");
  for (const node of document.querySelectorAll("body *")) {
    const box = node.getBoundingClientRect(), scrolls = node.closest("pre, .table, .unseen, .skip, svg");
    if (box.width && !scrolls && (box.right > width + 0.5 || box.left < -0.5))
      faults.push(`${node.localName}.${node.className} ${box.left} ${box.right}`);
  }
  return faults;
})()
"""

FAULTS_OF_CONTRAST = """
(() => {
  const context = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = layers => {
    context.clearRect(0, 0, 1, 1);
    for (const layer of layers) { context.fillStyle = layer; context.fillRect(0, 0, 1, 1); }
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = rgb => rgb.reduce((sum, c, i) => sum + linear(c / 255) * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = node => node ? [...behind(node.parentElement), getComputedStyle(node).backgroundColor] : [];
  const faults = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest("script, style")) continue;
    const layers = behind(node), front = [...layers, getComputedStyle(node).color];
    const [a, b] = [light(rgb(front)), light(rgb(layers))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) faults.push(`${walker.currentNode.data.slice(0, 40)}: ${ratio.toFixed(2)}`);
  }
  return faults;
})()
"""
NAMED = {"button", "link", "textbox", "combobox", "spinbutton", "checkbox", "image", "progressbar", "region"}


async def faults_of_names(page: Page) -> list[str]:
    """What assistive technology would find without a name, or twice under one id."""
    tree = (await page.send("Accessibility.getFullAXTree"))["nodes"]
    shown = [node for node in tree if not node["ignored"] and node["role"]["value"] in NAMED]
    assert shown
    nameless = [node["role"]["value"] for node in shown if not node.get("name", {}).get("value", "").strip()]
    ids = await page.evaluate("[...document.querySelectorAll('[id]')].map(node => node.id)")
    return nameless + [name for name in set(ids) if ids.count(name) > 1]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
@in_loop
async def test_every_view_fits_can_be_read_and_is_named(browser: str, width: int, scheme: str) -> None:
    long = "A-very-long-word-" * 12
    template, said = (
        CHATML + "<think></think>",
        f"<think>Hm.</think># {long}\n\n{HOSTILE}\n\n`{long}` {long}\n\n> * 1. {long}",
    )
    async with running_daemon(saying(said), template) as daemon:
        daemon.store.add("m" * 80, daemon.store.get("tiny").path)
        async with page_of(daemon, browser, width=width, height=740, scheme=scheme, motion="reduce") as page:
            await ask(page, long)
            await answered(page)
            for view in ("chat", "models", "activity"):
                await page.evaluate(f"void (location.hash = '{view}')")
                await page.until(f"!document.querySelector('#{view}-view').hidden")
                await page.until("document.querySelector('#pulse').className.includes('well')")
                assert await page.evaluate(FAULTS_OF_LAYOUT) == []
                assert await page.evaluate(FAULTS_OF_CONTRAST) == []
                assert await faults_of_names(page) == []
            luminance = await page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
            assert (sum(map(int, luminance[4:-1].split(","))) < 200) == (scheme == "dark")


@in_loop
async def test_colours_can_be_chosen_and_are_kept(browser: str) -> None:
    async with running_daemon() as daemon, page_of(daemon, browser) as page:
        colour = "getComputedStyle(document.documentElement).backgroundColor"
        light = await page.evaluate(colour)
        await page.click("#theme")
        assert await page.evaluate(colour) == light
        await page.click("#theme")
        dark = await page.evaluate(colour)
        assert dark != light
        await page.reload()
        assert await page.evaluate(colour) == dark
        await page.click("#theme")
        assert await page.evaluate(colour) == light


@in_loop
async def test_a_page_that_nobody_sees_asks_nothing(browser: str) -> None:
    async with running_daemon() as daemon, page_of(daemon, browser, "activity") as page:
        before = len(page.requests)
        await page.until(lambda: len(page.requests) > before)
        async with page.hidden():
            await asyncio.sleep(0.1)
            before = len(page.requests)
            await asyncio.sleep(1.4)
            assert len(page.requests) == before
        await page.until(lambda: len(page.requests) > before)
