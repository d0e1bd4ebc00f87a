"""What is measured of rounds: a model whose answers are known, and every figure in the file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.studies.gpu.rounds import CIRCLE, SMALL, build, generate, main

CPU = torch.device("cpu")


def test_the_model_goes_round_in_a_circle() -> None:
    model = build(SMALL["small"], CPU, torch.float32)
    start = torch.tensor([[CIRCLE + 5]])
    said = model.generate(start, max_new_tokens=2 * CIRCLE, do_sample=False)[0].tolist()
    assert said == [CIRCLE + (5 + i) % CIRCLE for i in range(2 * CIRCLE + 1)]
    _, stats = generate(model, start, 3 * CIRCLE)
    assert stats.acceptance > 0.8


def test_a_folder_is_a_checkpoint(tmp_path: Path) -> None:
    main(["folder", "--dry-run", "--out", str(tmp_path)])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.decode(tokenizer("Two words.").input_ids) == "Two words."
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 3


def test_facts_and_the_fallback(tmp_path: Path) -> None:
    for part in ("facts", "fallback"):
        main([part, "--dry-run", "--out", str(tmp_path / part)])
    facts = json.loads((tmp_path / "facts").read_text())
    assert facts["bytes_per_second"] > 0
    assert facts["seconds_per_launch"] > 0
    assert json.loads((tmp_path / "fallback").read_text())["refusal"] == "it is on cpu"


def test_rounds(tmp_path: Path) -> None:
    main(["rounds", "--dry-run", "--out", str(tmp_path / "rounds")])
    small = json.loads((tmp_path / "rounds").read_text())["small"]
    assert list(small["rounds"]) == ["batch 1, graphs auto", "batch 1, graphs off"]
    for found in small["rounds"].values():
        assert len(found["seconds"]) == len(found["captures"]) == len(found["replays"]) == 4
        assert found["ms_per_round"] > 0
        assert found["waits_per_round"] == found["calls_per_round"] == {}
    assert small["rounds"]["batch 1, graphs off"]["refusal"] == "set_cuda_graphs('off')"
    assert [step["nodes"] for step in small["steps"]] == [1, 4]
