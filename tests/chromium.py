"""A headless Chromium and its pages, spoken to in the DevTools protocol over one WebSocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from waiting import PATIENCE

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--remote-debugging-port=0",
)
_PORT_FILE = "DevToolsActivePort"
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), " ": (32, " ")}


def skip_without_chromium(whole_module: bool = False) -> None:
    """Skip the test, or the module that is being imported, on a machine without the browser."""
    if _CHROMIUM is None:
        reason = "there is no Chromium on this machine (Debian: apt-get install chromium)"
        pytest.skip(reason, allow_module_level=whole_module)


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[str]:
    """A browser with this profile, new and empty; the address of its WebSocket. Skips where there is none."""
    skip_without_chromium()
    assert _CHROMIUM is not None
    process = subprocess.Popen(
        [_CHROMIUM, *_FLAGS, f"--user-data-dir={folder}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + PATIENCE
        while not (folder / _PORT_FILE).exists() or not (folder / _PORT_FILE).read_text().count("\n"):
            assert process.poll() is None and time.monotonic() < deadline, "Chromium does not start"
            time.sleep(0.02)
        port, path = (folder / _PORT_FILE).read_text().split("\n")[:2]
        yield f"ws://127.0.0.1:{port}{path}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Page:
    """A page in a browser context of its own: no other page's storage is in it.

    requests: the addresses that it asked for. complaints: errors of its script and of the browser about it.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._session: str | None = None
        self._context = ""
        self._loaded = asyncio.Event()
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def send(self, method: str, **parameters: object) -> Any:
        """A command and its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": parameters}
        await self._socket.send_json(message | ({"sessionId": self._session} if self._session else {}))
        return await asyncio.wait_for(answer, PATIENCE)

    async def listen(self) -> None:
        """Take in what the browser says, until it is gone."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._take_answer(said)
            else:
                self._take_event(said["method"], said["params"])

    def _take_answer(self, said: dict[str, Any]) -> None:
        answer = self._answers.pop(said["id"])
        if answer.done():
            return
        if "error" in said:
            answer.set_exception(AssertionError(said["error"]["message"]))
        else:
            answer.set_result(said["result"])

    def _take_event(self, method: str, parameters: dict[str, Any]) -> None:
        match method:
            case "Page.loadEventFired":
                self._loaded.set()
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(str(parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["source"] != "network":
                self.complaints.append(parameters["entry"]["text"])

    async def attach(self) -> None:
        """Open the page, empty."""
        made = await self.send("Target.createBrowserContext", disposeOnDetach=True)
        self._context = context = made["browserContextId"]
        permissions = ["clipboardReadWrite"]
        await self.send("Browser.grantPermissions", permissions=permissions, browserContextId=context)
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")
        await self.look()

    async def look(
        self, width: int = 1200, height: int = 800, scheme: str = "light", motion: str = "no-preference"
    ) -> None:
        """Be a screen of this size and a user who prefers these."""
        features = {"prefers-color-scheme": scheme, "prefers-reduced-motion": motion}
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        named = [{"name": name, "value": value} for name, value in features.items()]
        await self.send("Emulation.setEmulatedMedia", features=named)

    async def open(self, url: str) -> None:
        """Go there, and wait for a first answer of the daemon."""
        await self._arrive("Page.navigate", url=url)

    async def reload(self) -> None:
        """Load it anew."""
        await self._arrive("Page.reload")

    async def _arrive(self, method: str, **parameters: object) -> None:
        self._loaded.clear()
        await self.send(method, **parameters)
        await asyncio.wait_for(self._loaded.wait(), PATIENCE)
        await self.until(
            "document.querySelector('#pulse.well, #banner:not([hidden]), dialog[open]') !== null"
        )

    async def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        result = await self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, script: str | Callable[[], bool]) -> None:
        """Wait until an expression in the page, or a condition here, is true."""
        deadline = time.monotonic() + PATIENCE
        while not (script() if callable(script) else await self.evaluate(script)):
            told = script if isinstance(script, str) else "the condition"
            assert time.monotonic() < deadline, f"not within {PATIENCE:g} s: {told}; {self.complaints}"
            await asyncio.sleep(0.02)

    async def text(self, selector: str) -> str:
        """The text on view in the first such element."""
        return str(await self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText"))

    async def click(self, selector: str) -> None:
        """Click where the element is, which must be on view and on top."""
        x, y = await self.evaluate(
            "(node => { node.scrollIntoView({block: 'nearest'}); const box = node.getBoundingClientRect();"
            " const at = [box.x + box.width / 2, box.y + box.height / 2];"
            " if (!node.contains(document.elementFromPoint(...at))) throw new Error('covered');"
            f" return at; }})(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def type(self, text: str) -> None:
        """Have the focused element get a text."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, shift: bool = False) -> None:
        """Press a key and let it go."""
        code, text = _KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    @contextlib.asynccontextmanager
    async def hidden(self) -> AsyncIterator[None]:
        """For the block another tab is in front of it."""
        other = await self.send("Target.createTarget", url="about:blank", browserContextId=self._context)
        await self.until("document.hidden")
        yield
        await self.send("Target.closeTarget", targetId=other["targetId"])
        await self.until("!document.hidden")

    async def screenshot(self, path: Path) -> None:
        """What is on view, as PNG."""
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.asynccontextmanager
async def new_page(address: str) -> AsyncIterator[Page]:
    """A page in the browser of this address."""
    async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
        page = Page(socket)
        listening = asyncio.create_task(page.listen())
        try:
            await page.attach()
            yield page
        finally:
            listening.cancel()
