"""Training of adaptive tokens on the target's own answers (`hf-spec train sdsat`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from transformers import PreTrainedModel

from hf_spec.adapters.card import save_with_card
from hf_spec.adapters.folder import BaseModel, SpecAdapter
from hf_spec.models.adaptive_tokens import CONFIG_ENTRY
from hf_spec.models.draft_head import check_plain_head
from hf_spec.training.infilling import Infilling
from hf_spec.training.sdsat_chains import Text, agreement
from hf_spec.training.sdsat_student import SdsatTrainSettings, Student
from hf_spec.training.split import learned_and_held
from hf_spec.training.teacher import Example
from hf_spec.training.trainer import TrainSettings, micro_batches, train


def train_sdsat(
    model: PreTrainedModel,
    examples: Sequence[Example],
    folder: Path,
    settings: SdsatTrainSettings,
    run: TrainSettings,
    tokenizer: Any = None,
) -> SpecAdapter | None:
    """Train adaptive tokens and write their adapter, or the fine-tuned model, to `folder`.

    Args:
        model: the target. Frozen, but in mode "full" it is what learns, in place.
        examples: its answers; the target's opinions are read if `soft_weight` is not 0.
        folder: receives the result; checkpoint and metrics go into its `training` folder.
        settings: what is trained.
        run: how.
        tokenizer: of the target; needed for infilling, saved with a fine-tuned model.

    Returns:
        The adapter; None in mode "full".

    Raises:
        UnsupportedError: if the target changes its logits behind the head.
        OptionError: if nothing is left to train on or to evaluate with.
    """
    check_plain_head(model)
    learned, held = learned_and_held(examples, settings.held_back, "examples")
    infilling = Infilling.of(tokenizer) if settings.infilling else None
    base = BaseModel.of(model)
    torch.manual_seed(run.seed)
    student = Student(model, settings, infilling)
    lengths = [len(e.response.prompt) + len(e.response.response) for e in learned]
    epochs = micro_batches(learned, lengths, run)

    def evaluate() -> dict[str, float]:
        texts = [Text.of(example) for example in held]
        tokens, positions = student.used_tokens(), settings.evaluated_positions
        return agreement(model, tokens, texts, settings.window, positions)

    facts = {**asdict(settings), "examples": len(examples)}
    try:
        figures = train(
            student.parameters, student.loss, epochs, run, folder / "training", evaluate, facts
        )
    finally:
        student.release()
    options = {
        "num_adaptive": settings.num_adaptive or settings.window,
        "training": {**facts, **asdict(run)},
        "held_back": figures,
    }
    if settings.mode == "full":
        if PartialState().is_main_process:
            _save_model(model, student.token_ids, folder, settings, options, tokenizer)
        return None
    adapter = student.tokens.to_adapter(base, options)
    if PartialState().is_main_process:
        save_with_card(folder, adapter)
    return adapter


def _save_model(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    folder: Path,
    settings: SdsatTrainSettings,
    options: dict[str, Any],
    tokenizer: Any,
) -> None:
    """Write a fine-tuned model; its adaptive tokens are never generated, with or without SDSAT."""
    entry = {"token_ids": list(token_ids), "window": settings.window, **options}
    setattr(model.config, CONFIG_ENTRY, entry)
    generation: Any = model.generation_config
    suppressed = {*(generation.suppress_tokens or ()), *token_ids}
    generation.suppress_tokens = sorted(suppressed)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
