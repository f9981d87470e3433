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
from importlib.resources import files
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium")
START_S = 40.0
ANSWER_S = 30.0
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


class Page:
    """One page. `complaints` are what its console, its policy and its script complained of."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())
        self.complaints: list[str] = []
        self.requested: list[str] = []

    async def _read(self) -> None:
        async for frame in self._socket:
            message = frame.json()
            if "id" in message:
                self._answers.pop(message["id"]).set_result(message)
            elif message["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))
            elif message["method"] == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(str(message["params"]["entry"]))
            elif message["method"] == "Network.requestWillBeSent":
                self.requested.append(message["params"]["request"]["url"])

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        message = await asyncio.wait_for(answer, ANSWER_S)
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")
        await self.call("Page.navigate", url=url)
        await self.until("location.protocol !== 'about:' && document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str, timeout_s: float = 60.0) -> Any:
        """Wait until an expression holds in the page; its value then."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (value := await self.evaluate(expression)):
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
        await self._socket.close()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


@contextlib.asynccontextmanager
async def browser(url: str, *flags: str) -> AsyncIterator[Page]:
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
                socket = await http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0)
                page = Page(socket)
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
