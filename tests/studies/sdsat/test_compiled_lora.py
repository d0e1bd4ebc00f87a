"""LoRA inside and outside of compiled layers: both are timed, on the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from examples.studies.sdsat.compiled_lora import OUTSIDE, main
from hf_spec.adapters.folder import save_adapter
from hf_spec.engine.fast.compiled_layers import CompiledLayer
from tests import tiny_models
from tests.compiler import needs_compiler


@needs_compiler
def test_command(folder: Path, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    save_adapter(tmp_path / "adapter", tiny_models.random_adaptive_tokens(model))
    out = tmp_path / "lora.json"
    given = ["--model", str(folder), "--adapter", str(tmp_path / "adapter"), "--per-task", "1"]
    uncompiled: list[bool] = []
    run = CompiledLayer._run_uncompiled

    def note(self: CompiledLayer, args: Any, kwargs: Any, step: Any) -> Any:
        uncompiled.append(step is not None and step.gate is not None)
        return run(self, args, kwargs, step)

    monkeypatch.setattr(CompiledLayer, "_run_uncompiled", note)
    main([*given, "--new-tokens", "6", "--repeats", "1", "--num-adaptive", "2", "--out", str(out)])
    assert any(uncompiled)
    assert "| over plain |" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert list(written["summary"]) == ["plain", "none", OUTSIDE, "sdsat", "sdsat k=2"]
    assert all(row["identical"] for row in written["rows"])
    assert all(summary["identical"] == "6 of 6" for summary in written["summary"].values())
