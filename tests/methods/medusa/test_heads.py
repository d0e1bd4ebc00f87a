"""Medusa heads and MLP speculators: published files, and drafts equal to plain torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import AssistantError, HeadsConfig
from hf_spec.adapters.published import PublishedHead, read_published
from hf_spec.methods.medusa.heads import (
    MedusaHeads,
    NewestFeatures,
    build_medusa,
    build_mlp_speculator,
)
from tests.feature_reference import (
    SIZE,
    check_against,
    medusa,
    medusa_reference,
    published,
    save,
    speculator,
    speculator_reference,
    watch_drafts,
)
from tests.tiny_models import VOCAB, build, prompts

TREE = [[0], [1], [2], [5], [0, 0], [0, 2], [1, 0], [5, 1], [0, 0, 0], [0, 0, 3], [1, 0, 0]]


def prefixed(head: PublishedHead) -> PublishedHead:
    """Return the heads in the layout of version 1.0: prefixed, in a file of a whole model."""
    tensors = {f"medusa_head.{key}": tensor for key, tensor in head.tensors.items()}
    return published("medusa", head.config, {**tensors, "model.norm.weight": torch.ones(SIZE)})


def check_drafts(folder: Path, head: PublishedHead, reference: Any, name: str = "llama") -> None:
    """Check every draft of a ragged batch, with the head saved and read back."""
    file = "medusa_lm_head.safetensors" if head.family == "medusa" else "model.safetensors"
    with watch_drafts() as seen:
        build(name).generate(
            **prompts(name, "ragged"),
            max_new_tokens=7,
            do_sample=False,
            spec_strategy=HeadsConfig(tree=TREE),
            assistant=save(folder, head, file),
        )
    assert check_against(reference(build(name), head), seen, TREE) > 100


@pytest.mark.parametrize(
    "head",
    [medusa(), medusa(2), medusa(1, projected=False), prefixed(medusa())],
    ids=["as published", "two blocks", "the target's projection", "version 1.0"],
)
def test_medusa(head: PublishedHead, tmp_path: Path) -> None:
    check_drafts(tmp_path, head, medusa_reference)


@pytest.mark.parametrize("scale_input", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_mlp_speculator(tied: bool, scale_input: bool, tmp_path: Path) -> None:
    check_drafts(tmp_path, speculator(tied, scale_input), speculator_reference)


def test_a_target_that_scales_its_embedding(tmp_path: Path) -> None:
    check_drafts(tmp_path, medusa(1, projected=False), medusa_reference, "gemma3")


def test_counts_come_from_the_tensors(tmp_path: Path) -> None:
    """The config has two heads, but the file has three."""
    head = read_published(save(tmp_path, medusa()))
    assert head is not None
    assert head.config["medusa_num_heads"] == 2
    assert build_medusa(head, build("llama")).num_levels == 3


def test_logits_of_two_rounds() -> None:
    model, head = build("llama"), medusa()
    reference, runner = medusa_reference(model, head), NewestFeatures(build_medusa(head, model), 1)
    text = list(range(3, 15))
    states = model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0].detach()
    with runner.active():
        for begin, end in ((0, 8), (8, 11)):
            runner.learn({0: (begin, end - begin)}, [states[begin:end]])
            proposed = runner.propose({0: text[end]}, 3)
            parents = torch.tensor([0])
            for path in ((), (5,), (5, 7)):
                token = torch.tensor([[text[end], *path][-1]])
                logits = proposed.after(token, parents)[0]
                assert (logits - reference(text[: end + 1], path)).abs().max() < 1e-5


class TestRefused:
    def refused(self, head: PublishedHead, match: str, **changes: Any) -> None:
        config = {**head.config, **changes.pop("config", {})}
        tensors = {**head.tensors, **changes}
        kept = {key: tensor for key, tensor in tensors.items() if tensor is not None}
        make = build_medusa if head.family == "medusa" else build_mlp_speculator
        with pytest.raises(AssistantError, match=re.escape(match)):
            make(published(head.family, config, kept), build("llama"))

    def test_a_head_for_another_target(self) -> None:
        self.refused(
            medusa(),
            "'a-head' does not fit a target of hidden size 32 and 97 tokens: 0.0.linear.weight is "
            "(16, 16), not (32, 32)",
            **{"0.0.linear.weight": torch.zeros(16, 16)},
        )

    def test_a_missing_head(self) -> None:
        gone = {key: None for key in medusa().tensors if key.startswith("1.")}
        self.refused(medusa(), "'a-head' holds no Medusa heads", **gone)

    def test_a_missing_projection(self) -> None:
        self.refused(medusa(), "projections of some Medusa heads", **{"1.1.weight": None})

    def test_something_else(self) -> None:
        self.refused(medusa(), "holds no Medusa heads", **{"lm_head.weight": torch.zeros(VOCAB, 8)})

    def test_levels_that_are_incomplete(self) -> None:
        self.refused(
            speculator(), "neither one of each for 3 levels", **{"speculator.head.1.weight": None}
        )

    def test_tied_weights_without_a_count(self) -> None:
        self.refused(speculator(tied=True), "n_predict=None", config={"n_predict": None})
        self.refused(speculator(tied=True), "n_predict=10000", config={"n_predict": 10_000})

    def test_an_option_of_another_type(self) -> None:
        self.refused(speculator(), "scale_input='yes'", config={"scale_input": "yes"})

    def test_nothing_at_all(self) -> None:
        empty = published("mlp_speculator", {}, {})
        with pytest.raises(AssistantError, match="is not an MLP speculator"):
            build_mlp_speculator(empty, build("llama"))


def test_heads_of_a_float16_target_compute_in_bfloat16() -> None:
    model = build("llama").__class__(build("llama").config).to(torch.float16)
    for head in (medusa(), medusa(1, projected=False)):
        built: MedusaHeads = build_medusa(head, model)
        assert next(built.parameters()).dtype is torch.bfloat16
        assert built(torch.ones(2, SIZE, dtype=torch.bfloat16), 3).shape == (2, 3, VOCAB)
    assert {p.dtype for p in model.parameters()} == {torch.float16}
