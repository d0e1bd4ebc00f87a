"""Ablation of DISCO's classifier: hidden features, labels, and the ranking of positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.disco import ablation
from examples.studies.disco.ablation import ablate, main, ranked_right, table, without
from hf_spec.methods.disco.settings import FEATURES, DiscoTrainSettings
from hf_spec.methods.disco.training import Observed
from hf_spec.training.responses import FORMAT
from tests.tiny_models import build, draft_model

SETTINGS = DiscoTrainSettings(max_epochs=6, batch_size=64, learning_rate=0.02)


def learnable(count: int = 20) -> list[Observed]:
    """Return texts whose positions are accepted if their largest probability is above 0.5."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        features = torch.rand(30, 12, generator=generator)
        matched = features[:, 0] > 0.5
        found.append(Observed(f"p{index}", features, matched, features[:, 0]))
    return found


def test_a_group_is_hidden_and_nothing_else() -> None:
    (one,) = learnable(1)
    for group, columns in FEATURES.items():
        (hidden,) = without([one], group, "soft")
        assert (hidden.features[:, columns] == 0).all()
        assert int((hidden.features != one.features).any(dim=0).sum()) == len(range(12)[columns])
        assert torch.equal(hidden.labels, one.labels)
    (hard,) = without([one], ablation.NOTHING, "hard")
    assert torch.equal(hard.features, one.features)
    assert torch.equal(hard.labels, one.matched.float())


def test_ranked_right_by_hand() -> None:
    matched = torch.tensor([True, True, False, False])
    assert ranked_right(torch.tensor([3.0, 2.0, 1.0, 0.0]), matched) == 1
    assert ranked_right(torch.tensor([0.0, 1.0, 2.0, 3.0]), matched) == 0
    # Two of the four pairs are right, one is wrong, and one is tied.
    assert ranked_right(torch.tensor([3.0, 1.0, 1.0, 2.0]), matched) == pytest.approx(2.5 / 4)


def test_what_matters_is_missed() -> None:
    rows = ablate(learnable(), SETTINGS, [0])
    assert len(rows) == 2 * (1 + len(FEATURES))
    found = {(row["labels"], row["left_out"]): row["ranked_right"] for row in rows}
    for labels in ("hard", "soft"):
        assert found[labels, "nothing"] > 0.9
        assert found[labels, "position"] > 0.9
        assert found[labels, "top_probs"] < 0.7
    lines = table([*rows, *rows]).splitlines()
    assert len(lines) == 2 + len(rows)
    assert lines[2].startswith("| hard | nothing | ")


def test_command(tmp_path: Path, capsys: Any) -> None:
    model, draft = build("llama"), draft_model("llama")
    model.save_pretrained(tmp_path / "target")
    draft.save_pretrained(tmp_path / "draft")
    responses = tmp_path / "answers.jsonl"
    lines: list[dict[str, Any]] = [{"format": FORMAT}]
    for index in range(8):
        prompt = torch.tensor([[3 + index, 5, 7]])
        text = model.generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()
        one = {"id": f"p{index}", "task": "x", "prompt": text[:3], "response": text[3:]}
        lines.append(one)
    responses.write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "rows.json"
    command = ["--model", str(tmp_path / "target"), "--assistant", str(tmp_path / "draft")]
    command += ["--responses", str(responses), "--observed", str(tmp_path / "seen")]
    main([*command, "--seeds", "1", "--out", str(out)])
    assert capsys.readouterr().out.startswith("| labels | left out |")
    written = json.loads(out.read_text())
    assert written["prompts"] == 8
    assert len(written["rows"]) == 8
