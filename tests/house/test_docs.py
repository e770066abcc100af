"""Examples work: those of README and docs/ as a reader would copy them, and those of docstrings."""

import doctest
import importlib
import json
import math
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from deltabus.bus import errors

from . import run_blocks
from .modules import MODULES

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
ALL_PAGES = (README, *(page for folder in ("docs", "examples") for page in sorted((ROOT / folder).rglob("*.md"))))
PAGES = [path for path in ALL_PAGES if "```py" in path.read_text("utf-8")]
WITH_EXAMPLES = [module for module in MODULES if ">>> " in module.text]
LIMIT_S = 100


def blocks_of(page):
    return list(run_blocks.python_blocks(page.read_text(encoding="utf-8")))


def run_page(page, place):
    command = [sys.executable, "-W", "error", run_blocks.__file__, str(page)]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=LIMIT_S, check=False)


def test_readme_has_examples():
    assert blocks_of(README)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_examples_of_pages_work(page, tmp_path):
    done = run_page(page, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_docstrings_have_examples():
    assert WITH_EXAMPLES


def test_every_error_is_explained():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert [name for name in errors.__all__ if f"`{name}`" not in page] == []


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_examples_work_together(tmp_path):
    def example(name, *arguments):
        return [sys.executable, str(ROOT / "examples" / name), *arguments]

    subprocess.run(example("plain_loop.py", "topic", "--steps", "3"), cwd=tmp_path, check=True, timeout=LIMIT_S)
    command = example("follow_and_serve.py", "topic", "weights", "--port", "0")
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as serving:
        try:
            url = serving.stdout.readline().split()[-1]
            with urllib.request.urlopen(url, json.dumps([1.0] * 16).encode(), timeout=LIMIT_S) as answer:
                told = json.loads(answer.read())
        finally:
            serving.kill()
    assert told["version"] >= 1 and math.isfinite(told["output"])


@pytest.mark.parametrize("module", WITH_EXAMPLES, ids=lambda module: module.name)
def test_examples_of_docstrings_work(module):
    result = doctest.testmod(importlib.import_module(module.name))
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("```python\na = 1\n```\ntext\n```python\nassert a == 1\n```\n", 0),
        ("```python\na = 1\n```\n```python\n>>> a + 1\n2\n>>> b = 3\n\n```\n```python\nassert b == 3\n```\n", 0),
        ("- item\n  ```python\n  assert True\n  ```\n", 0),
        ("```python no-run\nassert False\n```\n```\nassert False\n```\n```sh\nfalse\n```\n", 0),
        ("```python\nassert False\n```\n", 1),
        ("```python\n>>> 1 + 1\n3\n\n```\n", 1),
        ("```python\nimport warnings\nwarnings.warn('old')\n```\n", 1),
        ("```py\nassert True\n```\n", 1),
        ("```python norun\nassert True\n```\n", 1),
    ],
)
def test_pages_are_run_as_they_stand(text, status, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(text)
    done = run_page(page, tmp_path)
    assert done.returncode == status, done.stdout + done.stderr


def test_an_error_names_the_line_of_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\na = 1\nassert a == 2\n```\n")
    assert f'File "{page}", line 5' in run_page(page, tmp_path).stderr
