"""Tables of GPU records: those on the pages are current, and other records change them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.studies.gpu import tables
from examples.studies.gpu.rounds import SIZES, WAYS
from examples.studies.gpu.tables import BLOCK, PAGES, RUNS, TABLES, load, main, written


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_pages_have_the_figures_of_the_records(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text == written(text), "run: python -m examples.studies.gpu.tables"


def test_every_table_is_on_a_page() -> None:
    marks = [found[2] for page in PAGES for found in BLOCK.finditer(page.read_text("utf-8"))]
    assert sorted(marks) == sorted(TABLES)


def test_records_have_the_names_of_the_measurement() -> None:
    for path in RUNS.values():
        record = load(path)
        assert record.get("transcribed") or record["environment"]["commit"]
        for model in SIZES.keys() & record.keys():
            assert record[model]["batch 1"].keys() <= {"plain", "plain, compiled", *WAYS}
    assert set(tables.ORDER) | {"falcon", "eagle"} == {"plain", "plain, compiled", *WAYS}
    assert tables.SIZES.keys() <= SIZES.keys()


def test_another_record_changes_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = load(tables.CURRENT)
    found = record["llama-3.1-8b"]["batch 1"]
    found["plain"]["ms_per_token"], found["none"]["ms_per_token"] = 20.0, 8.0
    found["plain, compiled"] = {"ms_per_token": 6.25}
    del found["lookup"]
    (tmp_path / "rounds.json").write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.setattr(tables, "CURRENT", tmp_path / "rounds.json")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- gpu: short -->\nold\n<!-- end -->\nafter\n", encoding="utf-8")
    main([page])
    lines = page.read_text("utf-8").splitlines()
    assert lines[0] == "before"
    assert lines[-2:] == ["<!-- end -->", "after"]
    assert "| plain `generate()`, static cache, compiled | 6.25 | 3.2x |  |" in lines
    assert '| `"none"`: the engine without drafting | 8.0 | 2.5x | 0 |' in lines
    assert not any("old" in line or "lookup" in line for line in lines)
    assert any("upper bound" in line for line in lines if "1B" in line)
