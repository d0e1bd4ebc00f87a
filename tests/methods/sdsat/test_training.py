"""Training of adaptive tokens: modes, resuming, saving, trained weights and losses."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec import OptionError, SdsatConfig, UnsupportedError
from hf_spec.methods.sdsat.adaptive_tokens import merge_lora
from hf_spec.methods.sdsat.gated_lora import merge_lora_inplace
from hf_spec.methods.sdsat.infilling import Infilling
from hf_spec.methods.sdsat.settings import LEARNING_RATES, SdsatTrainSettings
from hf_spec.methods.sdsat.training import Student, train_sdsat
from hf_spec.methods.sdsat.training_chains import Text, agreement, draw_windows, slots_of
from hf_spec.training.answers import Example
from hf_spec.training.trainer import MicroBatch, TrainSettings
from tests.adapters.cards import card_metrics, rounded
from tests.tiny_models import build, repetitive_prompt

SETTINGS = SdsatTrainSettings(window=3, rank=4, start_share=0.4, held_back=0.2)
RUN = TrainSettings(epochs=2, batch_tokens=60, learning_rate=0.02, evaluate_every=50, save_every=2)


class TestTraining:
    @pytest.mark.by_default(mode=("gated",))
    @pytest.mark.parametrize(
        ("mode", "diverse"),
        [
            ("gated", False),
            ("gated", True),
            ("embeddings", True),
            ("lora", False),
            ("full", True),
        ],
    )
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

    @pytest.mark.parametrize("mode", ["gated", "lora", "full"])
    def test_rate_and_clean_loss_are_recorded(
        self, model: PreTrainedModel, examples: list[Example], tmp_path: Path, mode: Any
    ) -> None:
        """The loss on clean text is recorded if training can change it."""
        settings = replace(SETTINGS, mode=mode)
        run = replace(RUN, learning_rate=None, epochs=1, evaluate_every=1)
        train_sdsat(model, examples, tmp_path / "out", settings, run)
        lines = (tmp_path / "out" / "training" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert max(row["rate"] for row in rows) == LEARNING_RATES[mode]
        losses = [row["clean_loss"] for row in rows if "clean_loss" in row]
        assert len(set(losses)) == (0 if mode == "gated" else len(rows))

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

    def test_logits_changed_after_the_head(self, examples: list[Example], tmp_path: Path) -> None:
        with pytest.raises(UnsupportedError, match="final_logit_softcapping"):
            train_sdsat(build("gemma2"), examples, tmp_path, SETTINGS, RUN)


def gradients(student: Student) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in student.parameters.items() if p.grad is not None}


class TestLoss:
    def batch(self, examples: list[Example], count: int = 3) -> MicroBatch:
        return MicroBatch(list(examples[:count]), seed=5)

    @pytest.mark.parametrize("layout", ["branches", "replaced"])
    def test_a_frozen_base_learns_nothing(
        self, model: PreTrainedModel, examples: list[Example], layout: str
    ) -> None:
        student = Student(model, replace(SETTINGS, layout=layout))
        total, count = student.loss(self.batch(examples))
        assert count > 0
        total.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert gradients(student)["embeddings"].any()

    @pytest.mark.parametrize("mode", ["gated", "embeddings", "lora"])
    def test_standard_tokens_after_a_replaced_one_give_no_gradient(
        self, model: PreTrainedModel, examples: list[Example], mode: str
    ) -> None:
        """The improved loss reads the mixed text only at its adaptive positions."""
        read: list[tuple[set[tuple[int, int]], set[tuple[int, int]] | None]] = []
        settings = replace(SETTINGS, mode=mode, layout="replaced")
        student = Student(model, settings)
        logits = student._logits

        def watch(texts: Any, slots: Any, positions: Any) -> Tensor:
            found = logits(texts, slots, positions).detach().requires_grad_(True)
            adaptive = None
            if slots is not None:
                adaptive = {
                    (row, int(p)) for row, s in enumerate(slots) for p in (s >= 0).nonzero()[:, 0]
                }
            read.append((set(positions), adaptive))
            return found

        student._logits = watch  # type: ignore[method-assign]
        student.loss(self.batch(examples))
        mixed = [(positions, adaptive) for positions, adaptive in read if adaptive is not None]
        assert len(mixed) == 1
        positions, adaptive = mixed[0]
        assert positions == adaptive
        # The clean half runs only if training changes the model on clean text.
        assert len(read) == (2 if mode == "lora" else 1)

    def test_the_gradient_of_a_standard_label_is_exactly_zero(
        self, model: PreTrainedModel, examples: list[Example]
    ) -> None:
        """Labels after standard tokens of the mixed half have no effect."""
        settings = replace(SETTINGS, mode="embeddings", layout="replaced", start_share=0.2)
        student = Student(model, settings)
        text = Text.of(examples[0])
        windows = draw_windows(text.free(), 3, torch.Generator().manual_seed(5), 0.2)
        slots = slots_of(windows, len(text.tokens))
        student._replaced([text], [slots])[0].backward()
        before = gradients(student)["embeddings"]
        student.parameters["embeddings"].grad = None
        # The same windows, with other tokens after the last adaptive one.
        last = int((slots >= 0).nonzero()[-1])
        tokens = list(text.tokens)
        for position in range(last + 2, len(tokens)):
            tokens[position] = 50
        other = replace(text, tokens=tokens)
        student._replaced([other], [slots])[0].backward()
        assert torch.equal(gradients(student)["embeddings"], before)

    def test_eq_8_reads_every_answer_token_of_the_mixed_text(
        self, model: PreTrainedModel, examples: list[Example]
    ) -> None:
        settings = replace(SETTINGS, mode="lora", loss="basic")
        _, count = Student(model, settings).loss(self.batch(examples))
        assert count == sum(len(e.response.response) for e in examples[:3])

    @pytest.mark.parametrize("mode", ["lora", "full"])
    def test_the_clean_loss_is_that_of_the_changed_model(
        self, model: PreTrainedModel, examples: list[Example], mode: Any
    ) -> None:
        student = Student(model, replace(SETTINGS, mode=mode))
        texts = [Text.of(example) for example in examples[:11]]
        before = student.clean_loss(texts)
        with torch.no_grad():
            for parameter in student.parameters.values():
                parameter.add_(0.1 * torch.randn_like(parameter))
        found = student.clean_loss(texts)
        if mode == "lora":
            merge_lora_inplace(model, student.tokens.lora.weights)
        losses: list[float] = []
        for text in texts:
            logits = model(torch.tensor([text.tokens])).logits[0, text.first - 1 : -1]
            labels = torch.tensor(text.tokens[text.first :])
            losses += torch.nn.functional.cross_entropy(logits, labels, reduction="none").tolist()
        # Computed in mixed precision.
        assert found == pytest.approx(sum(losses) / len(losses), rel=5e-3)
        assert abs(found - before) > 5e-2 * before

    def test_eq_9_is_half_the_sum_of_both_halves(
        self, model: PreTrainedModel, examples: list[Example]
    ) -> None:
        texts = [Text.of(example) for example in examples[:3]]
        totals = []
        for weight in (0.0, 1.0, 3.0):
            torch.manual_seed(0)
            settings = replace(SETTINGS, mode="lora", adaptive_weight=weight)
            total, count = Student(model, settings).loss(self.batch(examples))
            assert count == sum(len(text.tokens) - text.first for text in texts)
            totals.append(float(total.detach()))
        assert totals[2] - totals[0] == pytest.approx(3 * (totals[1] - totals[0]), rel=1e-3)
        # The LoRA changes nothing yet, so the clean half is the model's own cross-entropy.
        clean = 0.0
        with torch.no_grad():
            for text in texts:
                scores = build("llama")(torch.tensor([text.tokens])).logits[0].log_softmax(-1)
                for position in range(text.first - 1, len(text.tokens) - 1):
                    clean -= float(scores[position, text.tokens[position + 1]])
        assert totals[0] == pytest.approx(clean / 2, rel=0.02)

    def test_code_between_named_markers(
        self, model: PreTrainedModel, examples: list[Example], tokenizer: Any
    ) -> None:
        """Answers of the infilling task are rearranged, with markers that are never replaced."""
        settings = replace(SETTINGS, infilling=1.0, infilling_markers=("w0", "w1", "w2"))
        infilling = Infilling.of(tokenizer, settings.infilling_markers)
        student = Student(model, settings, infilling)
        for example in examples[:6]:
            text = student._text(example, torch.Generator().manual_seed(0))
            if example.response.task == "code":
                assert text.tokens[0] == 0
                assert {1, 2} <= set(text.tokens)
                assert text.fixed == {0, 1, 2}
            else:
                assert text == Text.of(example)
        assert student.loss(self.batch(examples))[1] > 0

    def test_distilling_needs_the_teacher(
        self, model: PreTrainedModel, examples: list[Example]
    ) -> None:
        losses = {}
        for share in (0.0, 0.5, 1.0):
            torch.manual_seed(0)
            student = Student(model, replace(SETTINGS, soft_weight=share))
            losses[share] = float(student.loss(self.batch(examples))[0].detach())
        assert losses[0.5] == pytest.approx((losses[0.0] + losses[1.0]) / 2, rel=1e-4)
        assert losses[0.0] != pytest.approx(losses[1.0], rel=1e-3)

    def test_answers_too_short_for_a_window_teach_nothing(
        self, model: PreTrainedModel, examples: list[Example]
    ) -> None:
        for layout in ("branches", "replaced"):
            student = Student(model, replace(SETTINGS, layout=layout))
            example = examples[0]
            short = replace(
                example,
                response=replace(example.response, response=example.response.response[:1]),
                top_tokens=example.top_tokens[:1],
                top_probs=example.top_probs[:1],
            )
            total, count = student.loss(MicroBatch([short], 0))
            total.backward()
            assert (float(total.detach()), count) == (0.0, 0)
            assert agreement(model, student.tokens, [Text.of(short)], 2, 4)["accepted"] == 0
