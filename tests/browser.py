"""A headless Chromium, driven over its DevTools protocol
(https://chromedevtools.github.io/devtools-protocol/), a WebSocket that carries JSON."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium")
START_S = 40.0
ANSWER_S = 30.0
CONNECT_S = 60.0
DOMAINS = ("Inspector", "Page", "Runtime", "Log", "Network")
WIDTH, PHONE_WIDTH = 1400, 390
STILL = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(swarmHealth.idle()))))"
"""Everything that the page of swarm health was told is shown."""

AXE = files("axe_core_python") / "axe.min.js"
SCREENSHOTS = Path(__file__).resolve().parents[1] / "test-output"
FLAGS = (
    "--headless=new",
    "--no-first-run",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-proxy-server",
    "--remote-debugging-port=0",
    f"--window-size={WIDTH},1300",
)


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a browser may take for an answer, and how often it is asked. More than once is for
    what may be asked twice alone: before each further time the connection is made anew."""

    answer_s: float = ANSWER_S
    tries: int = 1


ONCE = Patience()


class Navigated(Exception):
    """The page was left before the browser answered."""


class Page:
    """One page. `complaints` are what its console, its policy and its script complained of."""

    def __init__(self, http: aiohttp.ClientSession, address: str, patience: Patience) -> None:
        self._http, self._address, self._patience = http, address, patience
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._domains: dict[str, dict[str, Any]] = {}
        self.connections = 0
        """How often the connection was made. What Chromium counts for it begins anew with each."""
        self.complaints: list[str] = []
        self.requested: list[str] = []

    async def connect(self) -> None:
        """Connect to the page, anew if it was connected, and have the domains tell of events."""
        await self.close()
        async with asyncio.timeout(CONNECT_S):
            socket = await self._http.ws_connect(self._address, max_msg_size=0)
        self._socket, self._reader = socket, asyncio.create_task(self._read(socket))
        self.connections += 1
        for domain, parameters in self._domains.items():
            await self._ask(f"{domain}.enable", parameters)

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        try:
            async for frame in socket:
                self._take(frame.json())
        finally:
            for answer in self._answers.values():
                answer.cancel()
            self._answers.clear()

    def _take(self, message: dict[str, Any]) -> None:
        if "id" in message:
            if answer := self._answers.pop(message["id"], None):
                answer.set_result(message)
        elif message["method"] == "Inspector.targetCrashed":
            self.complaints.append("the page crashed")
        elif message["method"] == "Runtime.exceptionThrown":
            self.complaints.append(str(message["params"]["exceptionDetails"]))
        elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
            self.complaints.append(str(message["params"]["entry"]))
        elif message["method"] == "Network.requestWillBeSent":
            self.requested.append(message["params"]["request"]["url"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        for left in reversed(range(self._patience.tries)):
            try:
                if self._socket is None or self._socket.closed:
                    await self.connect()
                message = await self._ask(method, parameters)
                break
            except (TimeoutError, OSError, aiohttp.ClientError) as error:
                await self.close()
                if not left:
                    raise TimeoutError(
                        f"the browser does not answer {method} within {self._patience.answer_s:.0f} s; {error}; "
                        f"asked {self._patience.tries} times; {self.complaints}"
                    ) from error
        domain, _, name = method.partition(".")
        if name == "enable":
            self._domains[domain] = parameters
        elif name == "disable":
            self._domains.pop(domain, None)
        if "navigated" in message.get("error", {}).get("message", ""):
            raise Navigated(message)
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    async def _ask(self, method: str, parameters: dict[str, Any]) -> dict[str, Any]:
        """Ask once. Raises TimeoutError without an answer, ConnectionError when the connection
        breaks before one."""
        assert self._socket is not None
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            await self._socket.send_json({"id": number, "method": method, "params": parameters})
            done, _ = await asyncio.wait([answer], timeout=self._patience.answer_s)
            if not done:  # a machine that stood still wakes with the limit passed, and the answer not yet read
                done, _ = await asyncio.wait([answer], timeout=1.0)
        finally:
            self._answers.pop(number, None)
        if not done:
            raise TimeoutError(f"no answer to {method}")
        if answer.cancelled():
            raise ConnectionError("the connection broke")
        return answer.result()

    async def open(self, url: str) -> None:
        for domain in DOMAINS:
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("location.protocol !== 'about:' && document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def _value(self, expression: str) -> Any:
        """The value of an expression, None while the page gives way to the next one."""
        try:
            return await self.evaluate(expression)
        except Navigated:
            return None

    async def until(self, expression: str, timeout_s: float = 60.0) -> Any:
        """Wait until an expression holds in the page; its value then."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (value := await self._value(expression)):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            text = await self.evaluate("document.body ? document.body.innerText : ''")
            raise AssertionError(
                f"{expression} did not come to hold; {self.complaints}; the page says:\n{text}"
            ) from None
        return value

    async def dress(self, scheme: str) -> None:
        """Have the page drawn for people who prefer this scheme, light or dark."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self, name: str, width: int = WIDTH) -> Path:
        """The whole page, also what one has to scroll to, as a PNG under test-output/, in a window
        of this width."""
        window = {"width": width, "height": 600, "deviceScaleFactor": 1, "mobile": width < WIDTH}
        await self.call("Emulation.setDeviceMetricsOverride", **window)
        await self.until(STILL)
        window["height"] = max(await self.evaluate("document.documentElement.scrollHeight"), 600)
        await self.call("Emulation.setDeviceMetricsOverride", **window)
        await self.until(STILL)
        answer = await self.call("Page.captureScreenshot", format="png")
        await self.call("Emulation.clearDeviceMetricsOverride")
        SCREENSHOTS.mkdir(exist_ok=True)
        file = SCREENSHOTS / f"{name}.png"
        file.write_bytes(base64.b64decode(answer["data"]))
        return file

    async def violations(self) -> list[str]:
        """What axe (https://github.com/dequelabs/axe-core) finds that keeps people with
        disabilities from using the page."""
        await self.evaluate(AXE.read_text() + "; 0")
        found = await self.evaluate("axe.run(document).then((found) => found.violations)")
        return [f"{each['id']}: {each['help']}: {[node['html'][:200] for node in each['nodes']][:3]}" for each in found]

    async def close(self) -> None:
        if self._socket is None or self._reader is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience.answer_s):
                await self._socket.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        self._socket = self._reader = None


@contextlib.asynccontextmanager
async def browser(url: str, *flags: str, patience: Patience = ONCE) -> AsyncIterator[Page]:
    """A browser of its own with one page, at `url`, with more flags. It ends with the block, all
    its processes too."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="p2pdist-chromium-", ignore_cleanup_errors=True) as directory:
        words = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={directory}", "about:blank"]
        if os.geteuid() == 0:
            words.insert(1, "--no-sandbox")
        process = subprocess.Popen(
            words,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "HOME": directory},
        )
        try:
            port = await _port(Path(directory) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as http:
                async with http.get(f"http://127.0.0.1:{port}/json") as answer:
                    (target,) = [each for each in await answer.json() if each["type"] == "page"]
                page = Page(http, target["webSocketDebuggerUrl"], patience)
                try:
                    await page.open(url)
                    yield page
                finally:
                    with contextlib.suppress(ConnectionError, TimeoutError, AssertionError):
                        await page.call("Browser.close")
                    await page.close()
        finally:
            try:
                await asyncio.to_thread(process.wait, 60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    async with asyncio.timeout(START_S):
        while True:
            assert process.poll() is None, "the browser ended at once"
            with contextlib.suppress(OSError, ValueError, IndexError):
                return int(file.read_text().splitlines()[0])
            await asyncio.sleep(0.05)
