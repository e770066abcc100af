"""docs/scale.md: its tables are those that the script computes from docs/benchmarks.md, and mean what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
import scale

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "scale.md").read_text("utf-8")


@pytest.fixture(scope="module")
def rates():
    return scale.Rates.read((DOCS / "benchmarks.md").read_text("utf-8"))


def test_the_figures_are_those_of_the_script(rates):
    assert scale.fill(PAGE, scale.Case(), rates) == PAGE, "run python benchmarks/scale.py --docs docs"


def test_the_real_sequencer_and_planner_take_logs_of_many_writers(rates):
    table = scale.measured(scale.Case(writers=64), rates)
    assert "64 logs" in table.title and len(table.rows) > 4


def test_a_page_without_a_figure_is_refused(rates):
    with pytest.raises(LookupError, match="Qwen3"):
        scale.Rates.read("# nothing")
    with pytest.raises(ValueError, match="needs the lines"):
        scale.fill("# nothing", scale.Case(writers=8), rates)
