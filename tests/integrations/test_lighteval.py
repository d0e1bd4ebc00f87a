"""lighteval on a model with a stored strategy: the same answers as plain decoding."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lighteval", reason="needs the package lighteval in an environment of its own")

import torch
from lighteval.models.transformers.transformers_model import (
    TransformersModel,
    TransformersModelConfig,
)
from lighteval.tasks.requests import Doc, SamplingMethod

from hf_spec import DraftConfig, SpecStats, collect_stats
from tests.cli.answer.conftest import make_tokenizer
from tests.tiny_models import build

pytestmark = pytest.mark.integration

TEXTS = ("ab ab ab ab", "a b c d e f a b c", "xyz")
# A fixed draft length does not depend on measured costs.
FIXED = DraftConfig(max_draft_tokens=4)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_answers_are_those_of_plain_decoding(batch_size: int, tmp_path: Path) -> None:
    model: Any = copy.deepcopy(build("llama"))
    model.save_pretrained(tmp_path / "model")
    make_tokenizer(None).save_pretrained(tmp_path / "model")

    def answers(strategy: str | DraftConfig | None) -> list[str]:
        model.generation_config.spec_strategy = strategy
        # The target is its own draft model, so drafts are accepted.
        folder = str(tmp_path / "model")
        model.generation_config.assistant = folder if strategy == FIXED else None
        # Separate caches: lighteval stores answers by model name and would reuse them.
        config = TransformersModelConfig(
            model_name=folder,
            batch_size=batch_size,
            cache_dir=str(tmp_path / type(strategy).__name__),
            device="cpu",
            max_length=200,
            generation_parameters={"temperature": 0},
        )
        docs = [
            Doc(
                query=text,
                choices=[""],
                gold_index=0,
                id=str(number),
                task_name="texts",
                generation_size=24,
                stop_sequences=[],
                sampling_methods=[SamplingMethod.GENERATIVE],
            )
            for number, text in enumerate(TEXTS)
        ]
        try:
            found = TransformersModel.from_model(model, config).greedy_until(docs)
        finally:
            # lighteval turns gradients off.
            torch.set_grad_enabled(True)
        return [response.text[0] for response in found]

    with collect_stats() as stats:
        plain = answers(None)
        assert not stats
        assert answers(FIXED) == plain
        drafted = sum(stats, SpecStats([]))
        assert answers("auto") == plain
    assert len(set(plain)) == len(TEXTS)
    # Most tokens of the answers were drafted.
    assert drafted.accepted_tokens > drafted.target_forwards
    assert len(stats) > len(drafted.rows) / batch_size
