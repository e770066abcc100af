"""docs/failures.md names tests that exist, for each kind of failure."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "failures.md").read_text("utf-8")
NAMED = sorted(set(re.findall(r"`([a-z_/]+\.py)::([A-Za-z0-9_]+)`", PAGE)))
KINDS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]


def test_there_are_eleven_kinds():
    assert [int(kind.partition(".")[0]) for kind in KINDS] == list(range(1, 12))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.partition("\n")[0])
def test_each_line_names_a_test(kind):
    rows = [line for line in kind.splitlines() if line.startswith("| ")][1:]
    assert rows and all("::" in row.split("|")[3] for row in rows)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_each_test_that_is_named_exists(file, name):
    text = (TESTS / file).read_text("utf-8")
    assert re.search(rf"^ *(async )?def {name}\(|^{name} = ", text, flags=re.MULTILINE)
