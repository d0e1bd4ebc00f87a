"""Steps that reproduce the papers: their arguments, and a run of all on a tiny model."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from examples.studies.real_models import papers
from tests.cli.train.cli_files import run

# Options that shorten a step; they override earlier ones of the same name.
SHORT = {
    "gsd.sweep": "--per-task 1 --new-tokens 3 --max-draft-nodes 20",
    "gsd.merge_divergence": "--new-tokens 3 --max-draft-nodes 20",
    "lossless.sampling_rules": "--per-task 1 --tasks code --seeds 1 --new-tokens 3",
    "disco.transfer": "--new-tokens 4 --num-prompts 8",
    "ems_sd.batches": "--batch-sizes 2 --batches 1 --repeats 1 --new-tokens 2",
    "trainings": "",
    "sdsat.task_quality": "--num-problems 1 --new-tokens 3",
    "sdsat.infilling": "--num-gaps 2 --every 30",
    "falcon.glancing": "--seeds 1 --layers 1 --csgd off",
}
TRAINED = ["--batch-tokens", "256"]
SHORT_COMMANDS = {
    "train responses": ["--max-new-tokens", "12"],
    "train sdsat": [*TRAINED, "--infilling", "0"],
    "train falcon": [*TRAINED, "--num-train-epochs", "1"],
    "train disco": [],
    "calibrate disco": ["--max-prompts", "1", "--max-new-tokens", "3", "--threshold", "0.5"],
    f"bench {0}": ["--per-task", "1", "--max-new-tokens", "3"],
}


def test_missing_files_leave_their_option_out() -> None:
    step = papers.Step("x", 1, 1, False, "m --a {work} --human-eval {human_eval_file} --b")
    words = {"work": "w", "human_eval_file": ""}
    assert papers.arguments(step, words) == ["-m", "m", "--a", "w", "--b"]
    words["human_eval_file"] = "f"
    assert papers.arguments(step, words)[-3:] == ["--human-eval", "f", "--b"]


def test_the_list(capsys: Any) -> None:
    papers.main(["--list"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(papers.STEPS)
    assert [step.name for step in papers.steps(["gsd-sampled"])] == ["gsd-sampled"]
    with pytest.raises(SystemExit):
        papers.main(["gsd-sampled"])


@pytest.mark.full
def test_all_steps_on_a_tiny_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(papers, "checkpoint", lambda name: folder)
    rows = [
        {
            "id": f"mbpp-{n}" if n % 2 else f"stub-{n}",
            "task": "code",
            "turns": ["a b c " * (n - 79)],
        }
        for n in range(80, 100)
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    problem = {"task_id": "T/0", "prompt": "def f():\n", "canonical_solution": "    return 1\n"}
    problem |= {"test": "def check(f):\n    assert f()", "entry_point": "f"}
    human_eval = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(human_eval, "wt", encoding="utf-8") as file:
        file.write(json.dumps(problem) + "\n")
    ran: list[str] = []

    def here(command: list[str]) -> None:
        """Run the command in this process, with shorter settings."""
        module, *words = command[1:]
        ran.append(module)
        if module == "hf_spec":
            name = " ".join(words[:2]) if words[0] != "bench" else f"bench {0}"
            result: Any = run(*words, *SHORT_COMMANDS[name])
            assert result.exit_code == 0, (words, result.output)
            return
        more = SHORT[module.removeprefix("examples.studies.")].split()
        if "infilling" in module:
            more += ["--markers", "a", "b", "c"]
        if "glancing" in module:
            more += ["--", *SHORT_COMMANDS["train falcon"]]
        importlib.import_module(module).main([*words, *more])

    def in_process(words: list[str]) -> None:
        result: Any = run(*words)
        assert result.exit_code == 0, (words, result.output)

    monkeypatch.setattr(papers, "run_python", here)
    monkeypatch.setattr("examples.studies.falcon.glancing.run_part", in_process)
    records = tmp_path / "records"
    for name in ("gsd", "disco", "ems_sd", "sdsat", "falcon"):
        (records / name).mkdir(parents=True)
    command = ["--work", str(tmp_path / "work"), "--records", str(records)]
    papers.main([*command, "--train-prompts", str(prompts), "--human-eval", str(human_eval)])
    assert len(ran) == len(papers.STEPS)
    written = sorted(f"{path.parent.name}/{path.name}" for path in records.glob("*/*.json"))
    named = {word for step in papers.STEPS for word in step.words.split() if "{records}" in word}
    assert written == sorted(word.removeprefix("{records}/") for word in named)
