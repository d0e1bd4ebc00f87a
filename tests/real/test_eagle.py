"""SmolLM2-135M-Instruct with an EAGLE-3 head: training, drafting, and export to two layouts.

The head trains for a few seconds on the answers that it then drafts, so its drafts must be
accepted. `examples/studies/eagle` measures the quality of heads on other texts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import EagleConfig
from hf_spec.common.prompts import load_prompts
from hf_spec.evaluation.trace.rounds import record_rounds
from hf_spec.methods.eagle.settings import EagleTrainSettings
from hf_spec.methods.eagle.training import train_eagle
from hf_spec.methods.exporting import export_head
from hf_spec.training.features import fused_layers, stored_texts
from hf_spec.training.responses import Response
from hf_spec.training.settings import TrainSettings
from tests.identity import assert_identical
from tests.tiny_models import left_padded

pytestmark = [pytest.mark.real, pytest.mark.full]

NEW_TOKENS = 24
PROMPTS = load_prompts(per_task=1, tasks=["code", "math", "qa"])
GREEDY = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
SETTINGS = EagleTrainSettings(steps=3, vocabulary_size=512, mlp_size=256, held_back=0.5)
RUN = TrainSettings(epochs=40, batch_tokens=400, learning_rate=0.002, evaluate_every=40)


@pytest.fixture(scope="module")
def answers(smollm2: Any) -> list[Any]:
    """Return each prompt followed by plain `generate()`'s answer, (1, L) each."""
    model, tokenizer = smollm2
    return [model.generate(prompt.encode(tokenizer), **GREEDY) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def head(smollm2: Any, answers: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a head on the answers; the held-out set contains the same answers."""
    model, tokenizer = smollm2
    folder = tmp_path_factory.mktemp("eagle")
    responses = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = prompt.encode(tokenizer)[0].tolist()
        new = answer[0, len(ids) :].tolist()
        responses += [Response(f"{prompt.id} {i}", prompt.task, ids, new) for i in range(4)]
    texts = stored_texts(model, responses, folder / "features", fused_layers(model))
    train_eagle(model, texts, folder / "head", SETTINGS, RUN)
    return folder / "head"


# Half of what was measured: 2.29 and 3.00.
@pytest.mark.parametrize(("tree", "least"), [("chain", 1.1), ("dynamic", 1.5)])
def test_trained_drafts_are_accepted(
    tree: Any, least: float, head: Path, smollm2: Any, answers: list[Any]
) -> None:
    model, tokenizer = smollm2
    config = EagleConfig(tree=tree, max_draft_tokens=4)
    taus = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        call = {
            "input_ids": prompt.encode(tokenizer),
            **GREEDY,
            "spec_strategy": config,
            "assistant": head,
            "return_dict_in_generate": True,
        }
        output = model.generate(**call)
        assert_identical(model, call, output, answer, tokenizer=tokenizer)
        taus.append(output.spec_stats.tau)
    assert sum(taus) / len(taus) > least


def test_ragged_batch(head: Path, smollm2: Any) -> None:
    model, tokenizer = smollm2
    inputs = left_padded([prompt.encode(tokenizer)[0] for prompt in PROMPTS])
    plain = model.generate(**inputs, **GREEDY)
    call = {**inputs, **GREEDY, "spec_strategy": "eagle", "assistant": head}
    assert_identical(model, call, model.generate(**call), plain, tokenizer=tokenizer)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_exported_heads_draft_the_same(
    engine: str, head: Path, smollm2: Any, answers: list[Any], tmp_path: Path
) -> None:
    model, tokenizer = smollm2
    export_head(head, tmp_path / "out", engine, model.config.name_or_path)
    prompt = PROMPTS[0].encode(tokenizer)
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    config = EagleConfig(tree="chain", max_draft_tokens=4)

    def drafts(folder: Path) -> tuple[Any, list[list[int]], int]:
        sequences, rounds = record_rounds(model, inputs, config, str(folder), **GREEDY)
        verdicts = [one.verdict for one in rounds]
        kept = sum(len(verdict.accepted[0]) for verdict in verdicts)
        return sequences, [list(verdict.tree.tokens) for verdict in verdicts], kept

    (sequences, expected, kept), (again, found, also) = drafts(head), drafts(tmp_path / "out")
    assert found == expected
    assert kept == also > 0
    assert torch.equal(sequences, again)
    call = {**inputs, **GREEDY, "spec_strategy": config, "assistant": head}
    assert_identical(model, call, sequences, answers[0], tokenizer=tokenizer)
