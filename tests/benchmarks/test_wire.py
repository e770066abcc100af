import dataclasses
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from report import fill_page, fill_readme, goals_table, tables
from results import RealRun, Results, combine, goals, published, row
from wire import _exact, _write_docs

from deltabus.bench.end_to_end import Checkpoint
from deltabus.bench.rows import AUTOMATIC
from deltabus.codecs.encodings import ENCODINGS

ROOT = Path(__file__).parents[2]
LIMIT_S = 360
"""Where nothing is compiled yet, a run compiles the loops of three types in two processes first."""

pytestmark = pytest.mark.timeout(LIMIT_S + 30)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    figures = tmp_path_factory.mktemp("bench") / "figures.json"
    command = [sys.executable, str(ROOT / "benchmarks/wire.py"), "--quick", "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return msgspec.json.decode(figures.read_bytes(), type=Results), done.stdout


def test_a_quick_run_measures_every_row_exactly(quick):
    results, text = quick
    assert results.quick
    names = {each.name for each in results.whole.rows}
    assert {f"deltabus, {name}" for name in ENCODINGS} <= names
    assert len(published(results.whole)) == 7
    assert _exact(results)
    assert "Goals" in text
    assert AUTOMATIC in text


def test_no_row_is_below_what_is_possible(quick):
    results, _ = quick
    for figures in (*results.sweep, results.whole):
        for each in figures.rows:
            assert each.nbytes * 8 > figures.conditional
            assert min(each.encode, each.decode) > 0


def test_one_wrong_bit_makes_the_run_fail(quick):
    results, _ = quick
    bad = dataclasses.replace(results.whole.rows[3], exact=False)
    rows = [*results.whole.rows[:3], bad, *results.whole.rows[4:]]
    assert not _exact(dataclasses.replace(results, whole=dataclasses.replace(results.whole, rows=rows)))
    assert not _exact(dataclasses.replace(results, end_to_end=dataclasses.replace(results.end_to_end, exact=False)))


def test_goals_are_held_against_each_checkpoint_and_say_so_when_they_are_missed(quick):
    results, _ = quick
    stages = results.end_to_end.stages | {"apply": 0.01}
    durable = Checkpoint(12.0, {"save": 1.0, "flush": 5.0, "load": 1.0, "copy": 5.0}, 0.25)
    cached = Checkpoint(1.0, {"save": 0.85, "load": 0.05, "copy": 0.1}, 0.2)
    way = dataclasses.replace(results.end_to_end, stages=stages, durable=durable, cached=cached, left_out="")
    assert _against_checkpoints(results, way) == {
        "`apply`: share of loading a full checkpoint made durable and read from the disk": ("0.00", True),
        "`apply`: share of loading a full checkpoint through the page cache": ("0.07", False),
        "publish -> applied: times as fast as a full checkpoint made durable and read from the disk": ("48.00", True),
        "publish -> applied: times as fast as a full checkpoint through the page cache": ("5.00", False),
    }


def test_goals_against_a_checkpoint_that_was_left_out_are_not_met(quick):
    results, text = quick
    way = dataclasses.replace(results.end_to_end, durable=None, reread=None, left_out="no disk")
    found = _against_checkpoints(results, way)
    assert [each for what, each in found.items() if "from the disk" in what] == [("not measured", False)] * 2
    assert all(reached != "not measured" for what, (reached, _) in found.items() if "page cache" in what)
    rows = [row for table in tables(dataclasses.replace(results, end_to_end=way)) for row in table.rows]
    assert ("checkpoint on the disk: no disk", "left out") in rows
    assert not [row for row in rows if row[0].startswith("checkpoint on the disk: save")]
    assert text.count("not measured") == (0 if results.end_to_end.durable else 2)


def _against_checkpoints(results, way):
    found = goals(dataclasses.replace(results, end_to_end=way))
    return {goal.what: (goal.reached, goal.met) for goal in found if "full checkpoint" in goal.what}


def test_goals_say_whether_time_goes_with_the_changes(quick):
    results, _ = quick
    sparse = [g for g in goals(results) if "O(changed)" in g.what]
    assert [g.what.split("`")[1] for g in sparse] == ["step", "overwrite"]
    dense = dataclasses.replace(results, sweep=results.sweep[1:])
    assert not [g for g in goals(dense) if "O(changed)" in g.what]
    rows = [dataclasses.replace(each, decode=0.25) for each in results.sweep[0].rows]
    fast = dataclasses.replace(results, sweep=[dataclasses.replace(results.sweep[0], rows=rows), *results.sweep[1:]])
    assert all(g.met for g in goals(fast) if "O(changed)" in g.what)


def test_memory_of_a_run_is_the_most_of_its_steps(quick):
    results, _ = quick
    first = results.whole
    rows = [dataclasses.replace(each, encode_memory=None, decode_memory=7) for each in first.rows]
    other = dataclasses.replace(first, rows=rows)
    assert row(combine("both", [other, other]), AUTOMATIC).encode_memory is None
    assert row(combine("both", [other, first]), AUTOMATIC).encode_memory == row(first, AUTOMATIC).encode_memory
    assert row(combine("both", [other, first]), AUTOMATIC).decode_memory >= 7


def test_steps_of_a_run_are_added_up(quick):
    results, _ = quick
    one = results.whole
    both = combine("both", [one, one, one])
    assert both.changed == 3 * one.changed
    assert row(both, AUTOMATIC).nbytes == 3 * row(one, AUTOMATIC).nbytes
    assert row(both, AUTOMATIC).encode == row(one, AUTOMATIC).encode
    # Two steps at the start are left out; a row that only the last step has is no row of the run.
    fewer = dataclasses.replace(one, rows=one.rows[:-1])
    settled = RealRun("lr", [fewer, one, fewer, one]).settled()
    assert settled.changed == 2 * one.changed
    assert [each.name for each in settled.rows] == [each.name for each in fewer.rows]


def test_the_page_is_filled_in_and_again(quick):
    results, _ = quick
    results = dataclasses.replace(results, real=[RealRun("lr 1", [results.whole] * 3)])
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    filled = fill_page(page, results)
    assert fill_page(filled, results) == filled
    for table in tables(results):
        assert f"### {table.title}\n" in filled
    with pytest.raises(ValueError, match="the page needs"):
        fill_page("no place", results)


def test_readme_gets_the_goals_alone(quick):
    results, _ = quick
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    filled = fill_readme(page, results)
    assert fill_readme(filled, results) == filled
    assert goals_table(results).markdown(titled=False) in filled
    assert "### Machine" not in filled
    assert filled.startswith(page.partition("<!-- figures")[0])


def test_pages_are_renewed_where_they_lie(quick, tmp_path):
    pytest.importorskip("matplotlib")
    results, _ = quick
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("README.md", "docs/benchmarks.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    _write_docs(results, docs)
    assert (tmp_path / "README.md").read_text(encoding="utf-8").count("| met |") == 1
    assert "encode memory" in (docs / "benchmarks.md").read_text(encoding="utf-8")
    (tmp_path / "README.md").unlink()
    _write_docs(results, docs)
    assert not (tmp_path / "README.md").exists()


def test_pictures_are_drawn(quick, tmp_path):
    pytest.importorskip("matplotlib")
    from plots import draw

    results, _ = quick
    results = dataclasses.replace(results, real=[RealRun("lr 1", [results.whole] * 3)])
    paths = draw(results, tmp_path)
    assert {path.name for path in paths} == {"benchmark-bits.png", "benchmark-times.png", "benchmark-run.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
