"""Examples work: those of README and docs/ as a reader would copy them, and those of docstrings."""

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from . import run_blocks
from .modules import MODULES

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [path for path in (README, *sorted((ROOT / "docs").rglob("*.md"))) if "```py" in path.read_text("utf-8")]
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
