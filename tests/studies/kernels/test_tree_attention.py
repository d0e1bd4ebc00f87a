"""Kernel benchmark: only correct results are timed, and all settings are recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_spec_kernels import launches

from examples.studies.kernels.tree_attention import (
    Heads,
    check_results,
    contenders,
    main,
    make_problem,
    seconds_of,
    table,
    tree_of,
)

CPU = torch.device("cpu")
SMALL = Heads(heads=4, kv_heads=2, head_size=16, dtype="float32")
needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are compiled in this process"
)


def test_trees_are_chains_of_eight_below_a_root() -> None:
    tree = tree_of(12, [5, 6, 7])
    assert tree.parent == [-1, 0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10]
    assert tree.tokens == [5, 6, 7] * 4


@needs_interpreter
@pytest.mark.parametrize("nodes", [1, 10])
def test_contenders_compute_the_same(nodes: int) -> None:
    problem = make_problem(nodes, 5, SMALL, CPU)
    assert problem.visible.sum(dim=1)[-1] == 5 + [1, 2][nodes == 10]
    assert problem.num_bytes == 4 * (2 * nodes * 4 * 16 + 2 * (nodes + 5) * 2 * 16)
    before = launches["ragged_tree_attention"]
    results = {name: call() for name, call in contenders(problem, flex=False).items()}
    assert launches["ragged_tree_attention"] == before + 1
    check_results(results, "float32")
    results["kernel"] = results["kernel"] + 1e-3
    with pytest.raises(AssertionError, match="kernel differs from SDPA by 0"):
        check_results(results, "float32")


def test_a_call_is_timed_so_many_times_after_a_first_one() -> None:
    calls: list[int] = []
    assert len(seconds_of(lambda: calls.append(1), 3, CPU)) == 3
    assert len(calls) == 4


def test_table() -> None:
    record: dict[str, Any] = {
        "nodes": 4,
        "context": 128,
        "seconds": {"kernel": {"median": 1e-5}, "sdpa": {"median": 2.54e-5}},
    }
    assert table([record]).splitlines() == [
        "| context | nodes | kernel, us | sdpa, us |",
        "|---|---|---|---|",
        "| 128 | 4 | 10.0 | 25.4 |",
    ]
    assert table([{**record, "floor_seconds": 4e-6}]).splitlines() == [
        "| context | nodes | kernel, us | sdpa, us | floor, us |",
        "|---|---|---|---|---|",
        "| 128 | 4 | 10.0 | 25.4 | 4.0 |",
    ]


@needs_interpreter
def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "kernels.json"
    sizes = "--nodes 1 3 --contexts 6 --heads 2 --kv-heads 1 --head-size 16"
    rest = f"--dtype float32 --device cpu --repeats 2 --model {folder} --out {out}"
    main([*sizes.split(), *rest.split()])
    printed = capsys.readouterr().out
    assert "| 6 | 3 |" in printed
    written = json.loads(out.read_text())
    assert written["environment"].keys() >= {"device", "torch", "transformers", "triton"}
    assert [record["nodes"] for record in written["attention"]] == [1, 3]
    for record in written["attention"]:
        assert record["floor_seconds"] > 0
        assert record["seconds"].keys() == {"kernel", "sdpa"}
    for record in written["steps"]:
        assert record["seconds"].keys() == {"kernels", "torch"}
        assert all(spread["median"] > 0 for spread in record["seconds"].values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_without_a_gpu_it_says_so(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "there is no GPU here" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "kernels.json"
    main(f"--nodes 1 16 --contexts 128 --repeats 3 --model {folder} --out {out}".split())
    written = json.loads(out.read_text())
    for record in written["attention"]:
        assert record["seconds"].keys() == {"kernel", "sdpa", "flex"}
        assert record["seconds"]["kernel"]["median"] > record["floor_seconds"]
