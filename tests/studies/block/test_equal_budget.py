"""Equal-budget study: the sizes of the drafts, tau, and the number of trained parameters."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.block.equal_budget import main, measure, row_sum, shapes, trained_parameters
from hf_spec.common.outputs import RowStats
from tests.feature_reference import dflash, save
from tests.tiny_models import build


def test_shapes_have_equal_sizes() -> None:
    for method in ("block", "eagle", "falcon"):
        configs = {name: (config, sample) for name, config, sample in shapes(method)}
        tree, sample = configs["tree of 15"]
        assert (tree.max_nodes, sample) == (15, False)
        assert configs["chain of 4"][0].max_draft_tokens == 4
        if method == "falcon":
            assert max(map(len, tree.tree)) == 4
        else:
            assert tree.max_draft_tokens == 4


def test_sums_by_position() -> None:
    rows = [RowStats(accepted_by_position=[3, 1]), RowStats(accepted_by_position=[2])]
    assert row_sum(rows) == [5, 1]


def test_tau_without_the_round_of_the_prompt(tmp_path: Path) -> None:
    model: Any = copy.deepcopy(build("llama"))
    head = save(tmp_path / "head", dflash())
    prompts = [torch.tensor([5, 6, 7, 5, 6]), torch.tensor([9, 8, 7])]
    chain = next(config for name, config, _ in shapes("block") if name == "chain of 4")
    found = measure(model, prompts, chain, head, False, 6)
    assert found["rounds"] + found["accepted"] == 2 * 5
    assert found["tau"] == round(found["accepted"] / found["rounds"], 4)
    frozen = {**dflash().tensors, "lm_head.weight": torch.zeros(4, 4)}
    save(tmp_path / "more", replace(dflash(), tensors=frozen))
    counts = [trained_parameters("block", tmp_path / name) for name in ("head", "more")]
    assert counts[0] == counts[1] > 0
    assert trained_parameters("eagle", tmp_path / "more") == counts[0] + 16


@pytest.mark.full
def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    head, out = Path(save(tmp_path / "head", dflash())), tmp_path / "record.json"
    (head / "training").mkdir()
    (head / "training" / "run.json").write_text(json.dumps({"starts": [{"settings": {"seed": 0}}]}))
    (head / "training" / "metrics.jsonl").write_text(json.dumps({"step": 1, "tau": 0.5}))
    size = ["--per-task", "1", "--new-tokens", "4", "--out", str(out)]
    main(["--model", str(folder), "--head", f"block={head}", *size])
    record = json.loads(out.read_text())["heads"]["block"]
    assert set(record["drafts"]) == {name for name, _, _ in shapes("block")}
    assert record["training"]["last evaluation"] == {"tau": 0.5}
    assert "block, chain of 4: tau" in capsys.readouterr().out
