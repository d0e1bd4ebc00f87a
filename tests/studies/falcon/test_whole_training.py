"""One command trains a head from prompts, and resumes after an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.studies.falcon import whole_training
from hf_spec.adapters.folder import load_adapter
from hf_spec.training.responses import read_responses
from tests.cli.train.cli_files import run, save_model


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    save_model(tmp_path / "model")
    rows = [{"id": f"p{n}", "task": "qa", "turns": ["ba" * (n % 4 + 1)]} for n in range(70)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["--model", tmp_path / "model", "--prompts", prompts, "--work", tmp_path / "work"]
    words += ["--out", tmp_path / "head", "--new-tokens", 10, "--dtype", "float32", "--bits", 8]
    return [*map(str, words), "--", "--fused", "--block-size", "1", "--num-train-epochs", "1"]


@pytest.mark.full
def test_from_prompts_to_a_calibrated_head(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[list[str]] = []
    broken = True

    def here(words: list[str]) -> None:
        """Run the part in this process, which is faster; the first training is interrupted."""
        parts.append(words)
        if broken and words[:2] == ["train", "falcon"]:
            raise KeyboardInterrupt
        few = {"depth": 2, "num-ranks": 2, "max-nodes": 3, "generations": 1, "repeats": 1}
        more = [f"--{name}={value}" for name, value in few.items()] * (words[0] == "calibrate")
        result: Any = run(*words, *more)
        assert result.exit_code == 0, result.output

    monkeypatch.setattr(whole_training, "run_part", here)
    with pytest.raises(KeyboardInterrupt):
        whole_training.main(given)
    answers = [tmp_path / "work" / f"answers-{t}.jsonl" for t in ("0", "0.7")]
    before = [path.read_text() for path in answers]
    broken = False
    whole_training.main(given)
    assert [path.read_text() for path in answers] == before
    assert [part[0] for part in parts[-5:]] == ["train", "train", "train", "shrink", "calibrate"]
    adapter = load_adapter(tmp_path / "head", "falcon")
    assert adapter.options["shape"]["fused"]
    assert adapter.options["tree"]
    held = list(read_responses(tmp_path / "work" / whole_training.HELD))
    learned = adapter.options["training"]["texts"]
    assert learned == 140
    assert 0 < len(held) < 20
    assert len(held) == 2 * len({one.id for one in held})
