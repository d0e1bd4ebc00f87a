"""Layouts of Medusa heads: vLLM's, with and without a draft vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_spec import AssistantError, HeadsConfig
from hf_spec.adapters.published import PublishedHead, known_head
from hf_spec.methods.medusa.heads import NewestFeatures, build_medusa
from hf_spec.methods.medusa.layouts import TOKEN_MAP, for_vllm
from tests import head_training as checks
from tests.feature_reference import check_against, medusa, medusa_reference, save, watch_drafts
from tests.tiny_models import VOCAB, build, prompts


@pytest.mark.parametrize("vocabulary", [None, torch.tensor([2, 5, 7, 11, 40, 90])])
def test_vllms_layout_is_read_back(vocabulary: Tensor | None, tmp_path: Path) -> None:
    """All drafts of a ragged batch, and the logits of two rounds, equal the reference."""
    model, random = build("llama"), medusa(2)
    tensors = random.tensors
    if vocabulary is not None:
        tensors = {k: t[vocabulary] if len(t) == VOCAB else t for k, t in tensors.items()}
    config, stored = for_vllm(tensors, vocabulary, model)
    published = PublishedHead("medusa", config, stored, tmp_path, "a-head")
    plain = medusa_reference(model, replace(random, tensors=tensors))

    def reference(tokens: Any, path: Any) -> Tensor:
        few = plain(tokens, path)
        if vocabulary is None:
            return few
        return torch.full((VOCAB,), float("-inf")).index_put((vocabulary,), few)

    tree = [[0], [1], [0, 0], [0, 1], [0, 0, 0]]
    folder = save(tmp_path / "head", published)
    with watch_drafts() as seen:
        model.generate(
            **prompts("llama", "ragged"),
            max_new_tokens=7,
            do_sample=False,
            spec_strategy=HeadsConfig(tree=tree),
            assistant=folder,
        )
    assert check_against(reference, seen, tree) > 50
    heads, text = build_medusa(known_head(folder), model), list(range(3, 15))
    states, _ = checks.states_and_probs(model, text, None)
    runner = NewestFeatures(heads, 1)
    with runner.active():
        for begin, end in ((0, 8), (8, 11)):
            runner.learn({0: (begin, end - begin)}, [states[-1][begin:end]])
            proposed = runner.propose({0: text[end]}, 3)
            for path in ((), (5,), (5, 7)):
                token = torch.tensor([[text[end], *path][-1]])
                found = proposed.after(token, torch.tensor([0]))[0]
                torch.testing.assert_close(
                    found, reference(text[: end + 1], path), atol=1e-5, rtol=1e-5
                )


def test_a_shared_projection_and_whole_rows(tmp_path: Path) -> None:
    """vLLM's options: one projection for all heads, rows of all tokens, and no biases."""
    model = build("llama")
    size = model.config.hidden_size
    rows = torch.randn(VOCAB, size)
    ids = torch.tensor([9, 4, 70])
    tensors = {f"blocks.{i}.layers.0.weight": torch.randn(size, size) for i in range(2)}
    tensors |= {"lm_head.weight": rows, TOKEN_MAP: ids}
    config = {"model_type": "medusa", "num_heads": 2, "original_lm_head": True}
    found = known_head(save(tmp_path, PublishedHead("medusa", config, tensors, tmp_path, "x")))
    heads, state = build_medusa(found, model), torch.randn(1, size)
    for level in range(2):
        hidden = state + F.silu(state @ tensors[f"blocks.{level}.layers.0.weight"].T)
        torch.testing.assert_close(heads.draft_logits(state, level), hidden @ rows[ids].T)


@pytest.mark.parametrize("ids", [[1, 1], [VOCAB], [-1]])
def test_a_damaged_token_map(ids: list[int], tmp_path: Path) -> None:
    tensors = {**medusa().tensors, TOKEN_MAP: torch.tensor(ids)}
    with pytest.raises(AssistantError, match="token_map"):
        build_medusa(replace(medusa(), tensors=tensors), build("llama"))
