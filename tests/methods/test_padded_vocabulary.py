"""Draft models whose vocabulary is padded to another size, as in the Qwen families."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import hf_spec
from hf_spec import DraftConfig
from hf_spec.evaluation.bench.contenders import BaselineOutputs, plain
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.training.answers import answer_logits
from hf_spec.training.responses import Response
from tests.tiny_models import TIMINGS, VOCAB, build, disco_adapter, draft_model, padded, prompts

# These cover packed and rectangular inputs, and learned positions.
ARCHITECTURES = ["llama", "gpt2", "bloom"]
WIDTHS = [VOCAB - 40, VOCAB - 1, VOCAB + 31]


def strategies(name: str) -> dict[str, Any]:
    return {
        "draft": "draft",
        "tree": "tree",
        "gsd": hf_spec.GsdConfig(min_probability=0.0),
        "disco": hf_spec.DiscoConfig(adapter=disco_adapter(name)),
        "auto": hf_spec.AutoConfig(timings=TIMINGS),
    }


# Every width with every strategy, each pair on one of the architectures.
CASES = [
    (name, strategy, WIDTHS[(turn + place) % 3], ("one", "ragged")[(turn + place) % 2])
    for turn, name in enumerate(ARCHITECTURES)
    for place, strategy in enumerate(("draft", "tree", "gsd", "disco", "auto"))
]


@pytest.mark.by_default(strategy=("draft", "gsd", "auto"))
@pytest.mark.parametrize(("name", "strategy", "rows", "kind"), CASES)
def test_output_is_the_targets(name: str, strategy: str, rows: int, kind: str) -> None:
    # The prompts contain tokens that the smallest draft models have no embedding for.
    inputs = prompts(name, kind)
    assert int(inputs["input_ids"].max()) >= WIDTHS[0]
    settings = {**inputs, "max_new_tokens": 16, "do_sample": False}
    plain = build(name).generate(**settings)
    found = build(name).generate(
        **settings,
        spec_strategy=strategies(name)[strategy],
        assistant=padded(draft_model(name), rows),
    )
    assert found.tolist() == plain.tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_padding_rows_are_never_proposed(name: str) -> None:
    """A padded copy of the target drafts the target's tokens, even if padding rows are likelier."""
    target = build(name)
    itself = copy.deepcopy(padded(target, VOCAB + 31))
    with torch.no_grad():
        itself.get_output_embeddings().weight[VOCAB:] *= 100
    output = target.generate(
        **prompts(name, "one"),
        max_new_tokens=24,
        do_sample=False,
        spec_strategy=DraftConfig(max_draft_tokens=5),
        assistant=itself,
        return_dict_in_generate=True,
    )
    assert output.spec_stats.tau == 5.0


def test_drafts_go_on_behind_tokens_that_the_draft_model_lacks() -> None:
    """A smaller draft model drafts after a token that it has no embedding for."""
    target, draft = build("llama"), padded(draft_model("llama"), VOCAB - 40)
    text = torch.tensor([[5, 6, 7, VOCAB - 1]])
    output = target.generate(
        text,
        max_new_tokens=2,
        spec_strategy=DraftConfig(max_draft_tokens=1),
        assistant=draft,
        return_dict_in_generate=True,
    )
    assert output.spec_stats.counters["draft_nodes"] == 1


def test_transformers_loop_takes_its_candidates() -> None:
    target = build("llama")
    itself = padded(target, VOCAB + 31)
    prompt = prompts("llama", "one")["input_ids"]
    drafter = DraftModelDrafter(DraftConfig(max_draft_tokens=4), itself, vocab_size=VOCAB)
    candidates, _ = drafter.get_candidates(prompt)
    answers = BaselineOutputs(plain(target))(prompt, 4)
    assert candidates[0, prompt.shape[1] :].tolist() == answers[0]


@pytest.mark.parametrize("rows", WIDTHS)
def test_answers_are_read_with_the_targets_width(rows: int) -> None:
    response = Response("a", "code", [1, 2, 3], [4, VOCAB - 1, 6])
    logits = answer_logits(padded(draft_model("llama"), rows), [response], VOCAB)
    assert logits.shape == (3, VOCAB)
    assert torch.isinf(logits).sum() == 3 * max(0, VOCAB - rows)
