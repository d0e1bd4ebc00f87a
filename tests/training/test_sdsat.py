"""Training of adaptive tokens: modes, resuming, saving, refusals."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec import OptionError, SdsatConfig, UnsupportedError
from hf_spec.models.adaptive_tokens import merge_lora
from hf_spec.training.sdsat import train_sdsat
from hf_spec.training.sdsat_student import SdsatTrainSettings, Student
from hf_spec.training.teacher import Example
from hf_spec.training.trainer import MicroBatch, TrainSettings
from tests.adapters.cards import card_metrics, rounded
from tests.tiny_models import build, repetitive_prompt

SETTINGS = SdsatTrainSettings(window=3, rank=4, start_share=0.4, held_back=0.2)
RUN = TrainSettings(epochs=2, batch_tokens=60, learning_rate=0.02, evaluate_every=50, save_every=2)
MODES = ("gated", "embeddings", "lora", "full")


class TestTraining:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("diverse", [False, True], ids=["identical", "diverse"])
    def test_the_loss_falls(
        self,
        model: PreTrainedModel,
        examples: list[Example],
        tmp_path: Path,
        mode: str,
        diverse: bool,
    ) -> None:
        settings = replace(SETTINGS, mode=mode, diverse=diverse)
        before = copy.deepcopy(model).state_dict()
        run = replace(RUN, epochs=6)
        adapter = train_sdsat(model, examples, tmp_path / "out", settings, run)
        rows = [
            json.loads(line)
            for line in (tmp_path / "out" / "training" / "metrics.jsonl").read_text().splitlines()
        ]
        losses = [row["loss"] for row in rows]
        assert sum(losses[-4:]) < sum(losses[:4])
        assert 0 <= rows[-1]["slot_1"] <= 1
        if mode != "full":
            assert adapter is not None
            assert adapter.options["mode"] == mode
            assert card_metrics(tmp_path / "out") == rounded(adapter.options["held_back"])
            assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
            use = merge_lora(model, adapter) if mode == "lora" else model
            prompt = repetitive_prompt()
            plain = use.generate(prompt, max_new_tokens=9, do_sample=False)
            for fused in (False, True):
                found = use.generate(
                    prompt,
                    max_new_tokens=9,
                    do_sample=False,
                    spec_strategy=SdsatConfig(fused=fused),
                    assistant=adapter,
                )
                assert torch.equal(found, plain)

    @pytest.mark.parametrize("token_ids", [(), (95,)], ids=["appended", "spare"])
    def test_a_fine_tuned_model_knows_its_adaptive_tokens(
        self,
        model: PreTrainedModel,
        examples: list[Example],
        tmp_path: Path,
        token_ids: tuple[int, ...],
    ) -> None:
        settings = replace(SETTINGS, mode="full", token_ids=token_ids)
        assert train_sdsat(model, examples, tmp_path / "out", settings, RUN) is None
        assert list((tmp_path / "out").glob("*.safetensors"))
        fresh = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        own = list(token_ids) or [97]
        assert fresh.config.sdsat["token_ids"] == own
        assert fresh.generation_config.suppress_tokens == own
        prompt = repetitive_prompt()
        plain = fresh.generate(prompt, max_new_tokens=9, do_sample=False)
        found = fresh.generate(prompt, max_new_tokens=9, do_sample=False, spec_strategy="sdsat")
        assert torch.equal(found, plain)

    @pytest.mark.parametrize("stop_at", [3, 6])
    def test_a_resumed_run_equals_an_unbroken_one(
        self,
        model: PreTrainedModel,
        examples: list[Example],
        tmp_path: Path,
        stop_at: int,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        whole = train_sdsat(model, examples, tmp_path / "whole", SETTINGS, RUN)
        loss, calls = Student.loss, []

        def interrupted(self: Student, batch: MicroBatch) -> Any:
            calls.append(batch)
            if len(calls) == stop_at:
                raise KeyboardInterrupt
            return loss(self, batch)

        monkeypatch.setattr(Student, "loss", interrupted)
        needed = [parameter.requires_grad for parameter in model.parameters()]
        with pytest.raises(KeyboardInterrupt):
            train_sdsat(model, examples, tmp_path / "broken", SETTINGS, RUN)
        assert [parameter.requires_grad for parameter in model.parameters()] == needed
        monkeypatch.setattr(Student, "loss", loss)
        again = train_sdsat(model, examples, tmp_path / "broken", SETTINGS, RUN)
        assert whole is not None
        assert again is not None
        assert again.options["held_back"] == whole.options["held_back"]
        for name, tensor in whole.tensors.items():
            assert torch.equal(again.tensors[name], tensor)


class TestRefusals:
    def test_too_few_examples(
        self, model: PreTrainedModel, examples: list[Example], tmp_path: Path
    ) -> None:
        with pytest.raises(OptionError, match="1 examples are too few"):
            train_sdsat(model, examples[:1], tmp_path, SETTINGS, RUN)

    def test_infilling_needs_a_tokenizer_with_markers(
        self, model: PreTrainedModel, examples: list[Example], tmp_path: Path, tokenizer: Any
    ) -> None:
        settings = replace(SETTINGS, infilling=0.5)
        with pytest.raises(OptionError, match="no infilling tokens"):
            train_sdsat(model, examples, tmp_path, settings, RUN, tokenizer)

    def test_logits_changed_behind_the_head(self, examples: list[Example], tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError, match="final_logit_softcapping"):
            train_sdsat(build("gemma2"), examples, tmp_path, SETTINGS, RUN)
