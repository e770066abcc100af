import dataclasses
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from backend_results import BackendResults, fill_page, tables

ROOT = Path(__file__).parents[2]
LIMIT_S = 300
"""Where nothing is compiled yet, a run compiles first."""

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    figures, page = folder / "figures.json", folder / "benchmarks.md"
    page.write_text(Path(ROOT, "docs/benchmarks.md").read_text(encoding="utf-8"), encoding="utf-8")
    command = [sys.executable, str(ROOT / "benchmarks/backends.py"), "--quick", "--json", figures, "--docs", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return msgspec.json.decode(figures.read_bytes(), type=BackendResults), page.read_text(encoding="utf-8")


def figures_of(results, name):
    (found,) = [each for each in results.backends if each.name.startswith(name)]
    return found


def test_a_quick_run_measures_every_backend_exactly(quick):
    results, _ = quick
    assert results.quick
    assert results.exact
    assert len(results.backends) == 5
    for each in results.backends:
        assert each.steps.applied > each.steps.moving > 0
    assert [each.name for each in results.backends if each.requests is None] == ["`file://`"]
    assert [each.name for each in results.backends if each.speed is None] == [results.backends[-1].name]
    for speed in (each.speed for each in results.backends if each.speed is not None):
        assert min(speed.up, speed.down, speed.plain_up, speed.plain_down) > 0


def test_requests_of_a_step_are_those_of_its_blob_and_its_record(quick):
    results, _ = quick
    for each in results.backends:
        if each.requests is not None:
            unit = "messages" if each.name == "`nats://`" else "requests"
            assert 2 <= each.requests.writer[unit] < 30
            assert 1 <= each.requests.reader[unit] < 30
    notified = results.backends[-1].requests
    assert notified.writer["messages"] == 1  # the announcement


def test_the_page_holds_every_table(quick):
    results, page = quick
    for table in tables(results):
        assert table.markdown() in page
    other = dataclasses.replace(results, seconds=12345.0)
    again = fill_page(page, other)
    assert "12345 s" in again
    assert fill_page(again, results) == page
    with pytest.raises(ValueError, match="the page needs the lines"):
        fill_page("nothing", results)


def test_one_wrong_bit_makes_the_run_fail(quick):
    results, _ = quick
    first = results.backends[0]
    for name in ("steps", "speed"):
        bad = dataclasses.replace(first, **{name: dataclasses.replace(getattr(first, name), exact=False)})
        assert not dataclasses.replace(results, backends=[bad, *results.backends[1:]]).exact


def test_a_share_below_the_goal_says_so(quick):
    results, _ = quick
    first = results.backends[0]
    speed = dataclasses.replace(first.speed, up=89.0, plain_up=100.0, down=90.0, plain_down=100.0)
    table = tables(dataclasses.replace(results, backends=[dataclasses.replace(first, speed=speed)]))[1]
    assert [row[3:5] for row in table.rows] == [("0.89", "**no**"), ("0.90", "yes")]
