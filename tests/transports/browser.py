"""A real browser without a window, told what to do over its debugging port."""

import asyncio
import base64
import contextlib
import itertools
import shutil
import tempfile

import aiohttp

__all__ = ["BROWSER", "Page", "open_page"]

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
LIMIT = 60.0
_ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class Page:
    """One page.

    Attributes:
        faults: What scripts threw, and what the browser logged as an error.
    """

    def __init__(self, line):
        self._line = line
        self._numbers = itertools.count(1)
        self.faults = []

    async def call(self, method, **given):
        """Tell the browser something, and return what it answers."""
        number = next(self._numbers)
        await self._line.send_json({"id": number, "method": method, "params": given})
        async with asyncio.timeout(LIMIT):
            while True:
                told = await self._line.receive_json()
                if told.get("method") == "Runtime.exceptionThrown":
                    self.faults.append(told["params"]["exceptionDetails"])
                if told.get("method") == "Log.entryAdded" and told["params"]["entry"]["level"] == "error":
                    self.faults.append(told["params"]["entry"]["text"])
                if told.get("id") == number:
                    assert "error" not in told, told
                    return told["result"]

    async def value(self, script):
        """What a script gives."""
        return (await self.call("Runtime.evaluate", expression=script))["result"].get("value")

    async def until(self, script):
        """Wait until a script gives something true."""
        async with asyncio.timeout(LIMIT):
            while not await self.value(script):  # noqa: ASYNC110 - the condition is in the browser
                await asyncio.sleep(0.05)

    async def picture(self, file):
        """Write what is to be seen into a file."""
        file.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@contextlib.asynccontextmanager
async def open_page(url, *, width, height, dark):
    """Show a page in a browser of its own."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        process = await asyncio.create_subprocess_exec(
            BROWSER,
            *_ARGUMENTS,
            f"--user-data-dir={home}",
            "about:blank",
            stderr=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(LIMIT):
                while b"DevTools listening on" not in (line := await process.stderr.readline()):
                    assert line, "the browser did not start"
            address = line.decode().split()[-1].split("/")[2]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{address}/json/list") as answer:
                    (place,) = [t["webSocketDebuggerUrl"] for t in await answer.json() if t["type"] == "page"]
                async with session.ws_connect(place, max_msg_size=64 << 20) as line:
                    page = Page(line)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
                    await page.call("Emulation.setDeviceMetricsOverride", **size)
                    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
                    await page.call("Emulation.setEmulatedMedia", features=[scheme])
                    await page.call("Page.navigate", url=url)
                    yield page
        finally:
            process.kill()
            await process.communicate()
