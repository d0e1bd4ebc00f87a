"""Timing and records, as shared by the studies."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import pytest
import torch

from examples.studies import timing


@pytest.mark.parametrize(
    ("given", "clock"), [([], "perf_counter"), (["--processor-time"], "process_time")]
)
def test_a_record_says_how_it_was_timed(
    folder: Path, tmp_path: Path, given: list[str], clock: str
) -> None:
    parser = argparse.ArgumentParser()
    timing.add_options(parser)
    out, before = tmp_path / "record.json", torch.get_num_threads()
    options = parser.parse_args(
        ["--model", str(folder), "--threads", "1", "--out", str(out), *given]
    )
    try:
        model, found = timing.begin(options)
        timing.write_record(options, {"seconds": [1.0]})
    finally:
        torch.set_num_threads(before)
    assert found is getattr(time, clock)
    assert model.dtype == torch.float32
    written = json.loads(out.read_text())
    assert written["environment"]
    assert written["threads"] == 1
    assert written["processor_time"] == bool(given)
    assert written["seconds"] == [1.0]


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    timing.write_record(argparse.Namespace(out=None), {})
    assert list(tmp_path.iterdir()) == []


def test_records_have_no_paths_of_a_machine(tmp_path: Path) -> None:
    assert timing.shown(str(tmp_path / "model")) == "model"
    assert timing.shown("examples/adapters/x") == "examples/adapters/x"
    assert timing.shown("org/model") == "org/model"
