"""What a service shows: its description, which a fuzzer holds it to, its page in a real browser, and its state."""

import asyncio
import hashlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from deltabus.bus.message import Blob, Stats, encode_message
from deltabus.cli.app import app
from deltabus.transports import open_transport

from ..bus.support import anchor, delta
from .browser import BROWSER, open_page
from .relay_server import RelayServer

ROOT = Path(__file__).parents[2]
LIMIT = 90.0


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    place = tmp_path_factory.mktemp("service")
    with RelayServer(place, (place / "topics").as_uri()) as server:
        yield server


@pytest.mark.timeout(LIMIT + 30)
def test_it_does_what_its_description_says_whatever_is_asked(server, tmp_path):
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()"]
    command += ["--config-file", Path(__file__).with_name("schemathesis.toml")]
    command += ["run", ROOT / "docs/openapi.yaml", "--url", server.url, "--exclude-path-regex", "events$"]
    command += ["--phases", "coverage,fuzzing", "--max-examples", "3", "--no-color"]
    command += ["--generation-deterministic", "--continue-on-failure", "--warnings", "off", "--request-timeout", "20"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
    assert int(re.search(r"(\d+) generated", done.stdout)[1]) > 150
    assert server.figure("deltabus_errors_total", code="internal") == 0
    assert "Traceback" not in server.log.read_text()


async def publish(transport, messages):
    for each in messages:
        await transport.append("trainer", each.position, encode_message(each))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed; Debian: apt install chromium")
@pytest.mark.parametrize(("width", "height", "dark"), [(1100, 900, False), (360, 800, True)], ids=["desk", "phone"])
async def test_its_page_shows_what_happens_as_it_happens(server, tmp_path, width, height, dark):
    topic = f"pages/of-{width}"
    shape = b'{"tensors": [{"name": "w", "dtype": "BF16", "shape": [1000, 1000], "aliases": []}], "format": 1}'
    schema = Blob(key=f"schemas/{'0' * 63}{width % 10}.json", size=len(shape), checksum=hashlib.sha256(shape).digest())
    fields = {"writer": "trainer", "schema": schema, "created": time.time(), "stats": Stats(changed=8, total=1000)}
    lease = msgspec.msgpack.encode({"reader": "<img src=x onerror=throw(1)>", "holds": {"trainer": 1}, "seconds": 9.0})
    async with open_transport(f"{server.url}/{topic}", reader="engine-1") as transport:
        await transport.put(schema.key, shape)
        await publish(transport, [anchor(0, 1, size=1_400_000, **fields), delta(1, 2, size=9000, **fields)])
        await transport.put("leases/0123456789abcdef/000000000001", lease)
        async with open_page(server.url, width=width, height=height, dark=dark) as page:
            await page.until(f"document.body.innerText.includes('{topic}')")
            await page.until("document.getElementById('state').className === 'live'")
            section = f"[...document.querySelectorAll('section')].find((s) => s.innerText.includes('{topic}'))"
            text = await page.value(f"{section}.innerText")
            for shown in ("step 2", "9.0 kB", "2.0 MB", "0.45 %", "0.80 %", "<img src=x"):
                assert shown in text
            assert await page.value(f"{section}.querySelectorAll('rect').length") == 2
            await publish(transport, [delta(position, position + 1, size=9000, **fields) for position in range(2, 30)])
            await page.until(f"{section}.innerText.includes('step 30')")
            assert await page.value(f"{section}.querySelectorAll('rect').length") == 30
            server.call("POST", f"/{topic}/-/readers/engine-1", b'{"holds": {"trainer": 27}}')
            await page.until(f"/engine-1\\s+27\\s+3\\s/.test({section}.innerText)")
            assert await page.value("document.documentElement.scrollWidth") <= width
            back = await page.value("getComputedStyle(document.body).backgroundColor")
            assert (sum(map(int, re.findall(r"[0-9]+", back)[:3])) < 200) is dark
            await page.picture(tmp_path / "page.png")
            assert page.faults == []


async def test_a_terminal_shows_the_same(server, tmp_path):
    fields = {"writer": "trainer", "created": time.time() - 60, "stats": Stats(changed=8, total=1000)}
    url = f"{server.url}/terminal"
    async with open_transport(url, reader="engine-7") as transport:
        await publish(transport, [anchor(0, 1, **fields), delta(1, 2, size=9000, **fields)])
    server.call("POST", "/terminal/-/readers/engine-7", b'{"holds": {"trainer": 1}}')
    for asked in (url, server.url, (server.directory / "topics" / "terminal").as_uri()):
        ended = await asyncio.to_thread(CliRunner().invoke, app, ["status", asked])
        assert ended.exit_code == 0, ended.output
        assert re.search(r"terminal +trainer +2 +2 +[67][0-9] s +9.0 kB +0.800 %", ended.output), ended.output
        if asked.startswith("http"):
            assert re.search(r"engine-7 +1 +1 +no ", ended.output), ended.output
    server.kill()
    server.start()
    assert "terminal" in [topic["topic"] for topic in server.get("/-/status")["topics"]]
    told = await asyncio.to_thread(CliRunner().invoke, app, ["status", url, "--json"])
    assert json.loads(told.output)["topics"][0]["logs"][0]["version"] == 2
