"""Published layouts of block heads, and misleading configs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import AssistantError
from hf_spec.adapters.published import PublishedHead, read_published
from hf_spec.methods.block.dflash2 import PROJECTION
from hf_spec.methods.block.head import BlockHead
from hf_spec.methods.block.layouts import build_block_head
from tests.feature_reference import (
    BLOCK,
    LAYERS,
    MASK,
    SIZE,
    block_tensors,
    deepspec,
    dflash,
    dflash2,
    save,
    speculators,
)
from tests.tiny_models import VOCAB, build

MODEL = build("llama")


def changed(
    head: PublishedHead, tensors: dict[str, Any] | None = None, **config: Any
) -> PublishedHead:
    """Return the head with changed tensors and config entries; None removes an entry."""
    merged = {**head.tensors, **(tensors or {})}
    return PublishedHead(
        head.family,
        {k: v for k, v in {**head.config, **config}.items() if v is not None},
        {k: t for k, t in merged.items() if t is not None},
        head.folder,
        head.name,
    )


def read(head: PublishedHead, folder: Path) -> BlockHead:
    """Save a head in the Hub's files, then read and build it."""
    found = read_published(save(folder, head))
    assert found is not None
    assert found.family == head.family
    return build_block_head(found, MODEL)


@pytest.mark.parametrize(
    ("head", "levels"),
    [
        (dflash(), BLOCK - 1),
        (dflash(new=False), BLOCK - 1),
        (dflash2(), BLOCK - 1),
        (deepspec(), BLOCK),
        (deepspec(None, confidence=False), BLOCK),
        (speculators(), BLOCK),
        (speculators("dflash", None), BLOCK - 1),
        (speculators("dflash", None, sample_from_anchor=True), BLOCK),
        (speculators(sample_from_anchor=False), BLOCK - 1),
    ],
    ids=[
        "z-lab",
        "z-lab, older",
        "DFlash 2",
        "DSpark",
        "DeepSpec's DFlash",
        "speculators, DSpark",
        "speculators, DFlash",
        "DFlash with sample_from_anchor",
        "DSpark without sample_from_anchor",
    ],
)
def test_layouts(head: PublishedHead, levels: int, tmp_path: Path) -> None:
    """Block size, mask token, layer ids, and the number of levels are correct for every layout."""
    shape = read(head, tmp_path).shape
    assert shape.hidden_layers == tuple(LAYERS)
    assert shape.mask_token_id == MASK
    assert (shape.block_size, shape.num_levels) == (BLOCK, levels)


def test_equal_names_with_shifted_outputs(tmp_path: Path) -> None:
    """The architecture class decides which position an output drafts, even for equal tensors."""
    plain = changed(dflash(), architectures=["DFlashDraftModel"])
    shifted = changed(dflash(), architectures=["Qwen3DSparkModel"])
    assert not read(plain, tmp_path / "a").shape.from_anchor
    found = read_published(save(tmp_path / "b", shifted))
    assert found is not None
    assert build_block_head(found, MODEL).shape.from_anchor


def test_a_mask_instead_of_offsets_and_copies_of_the_target() -> None:
    """Some versions of speculators store these tensors, others leave them out."""
    head = speculators("dflash", None)
    ids = head.tensors["d2t"] + torch.arange(len(head.tensors["d2t"]))
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    copies = {"verifier_lm_head.weight": torch.ones(4, 4), "verifier_norm.weight": torch.ones(4)}
    other = changed(head, {"d2t": None, "t2d": mask, **copies})
    first, second = (build_block_head(one, MODEL) for one in (head, other))
    assert torch.equal(second.output.vocabulary, first.output.vocabulary)
    weights = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    assert all(a[0] == b[0] and torch.equal(a[1], b[1]) for a, b in weights)


def test_counts_come_from_the_tensors() -> None:
    head = changed(dflash(), num_hidden_layers=40, num_attention_heads=99, intermediate_size=7)
    built = build_block_head(head, MODEL)
    assert len(built.layers) == 2
    assert built.fc.in_features == len(LAYERS) * SIZE


def test_the_rope_is_the_heads_own() -> None:
    """The base is 10,000 if the config has none, and no table limits the positions."""
    other = changed(dflash(), rope_theta=None, max_position_embeddings=16)
    frequencies = build_block_head(other, MODEL).rotary.inv_freq
    assert torch.allclose(frequencies, 10000.0 ** (-torch.arange(0, 8, 2) / 8))
    scaled = changed(dflash(), rope_scaling={"rope_type": "linear", "factor": 4.0})
    assert torch.allclose(
        build_block_head(scaled, MODEL).rotary.inv_freq,
        build_block_head(dflash(), MODEL).rotary.inv_freq / 4,
    )
    cos, _ = build_block_head(other, MODEL).rotation(torch.tensor([100_000]))
    assert cos.isfinite().all()


def test_an_embedding_and_a_head_of_its_own() -> None:
    mine = build_block_head(deepspec(), MODEL)
    assert torch.equal(mine.embedding.weight, deepspec().tensors["embed_tokens.weight"])
    assert torch.equal(mine.output.scores.weight, deepspec().tensors["lm_head.weight"])
    theirs = build_block_head(dflash(), MODEL)
    assert theirs.embedding is MODEL.get_input_embeddings()
    assert theirs.output.scores is MODEL.get_output_embeddings()


def test_few_tokens_of_the_targets_head() -> None:
    few = speculators("dflash", None)
    head = changed(dflash(), {"d2t": few.tensors["d2t"]})
    assert build_block_head(head, MODEL).output.size == 60


def test_an_old_prefix() -> None:
    tensors = deepspec().tensors
    old = {f"logit_head.{key}" if "head." in key else key: t for key, t in tensors.items()}
    head = PublishedHead("dspark", deepspec().config, old, Path(), "a-head")
    assert build_block_head(head, MODEL).confidence is not None


def test_layers_that_slide() -> None:
    kinds = {"layer_types": ["full_attention", "sliding_attention"] * 3, "sliding_window": 6}
    on = changed(dflash(), use_sliding_window=True, **kinds)
    head = build_block_head(on, MODEL)
    assert [layer.self_attn.sliding_window for layer in head.layers] == [None, 6]
    assert head.shape.causal == (False, True)
    for causal in (False, True):
        head = build_block_head(changed(on, is_causal=causal), MODEL)
        assert head.shape.causal == (causal, causal)


def test_a_missing_list_of_layers_is_the_users_to_give() -> None:
    inner = {**dflash().config["dflash_config"], "target_layer_ids": None}
    head = changed(dflash(), dflash_config=inner)
    with pytest.raises(AssistantError, match=r"pass BlockConfig\(aux_layers="):
        build_block_head(head, MODEL)
    told = replace(head, overrides=(("aux_layers", (0, 3)),))
    assert build_block_head(told, MODEL).hidden_layers == (0, 3)


INNER, DFLASH2 = (head.config["dflash_config"] for head in (dflash(), dflash2()))


@pytest.mark.parametrize(
    ("head", "match"),
    [
        (changed(dflash(), {"fc.weight": None}), "it lacks 'fc.weight'"),
        (changed(dflash(), {"layers.0.self_attn.q_norm.weight": None}), "lacks the tensor"),
        (changed(dflash(), {"norm.weight": None}), "norm.weight is missing, not (32,)"),
        (
            changed(dflash(), {"layers.1.mlp.up_proj.weight": torch.zeros(3, 3)}),
            "layers.1.mlp.up_proj.weight is (3, 3), not (40, 32)",
        ),
        (
            changed(dflash(), {"fc.weight": torch.zeros(SIZE, 50)}),
            "does not fit a target of hidden size 32 and 97 tokens: fc.weight is (32, 50)",
        ),
        (changed(dflash(), dflash_config={**INNER, "block_size": 1}), "block_size=1"),
        (changed(dflash(), dflash_config={**INNER, "mask_token_id": None}), "mask_token_id=None"),
        (changed(dflash(), dflash_config={**INNER, "mask_token_id": VOCAB}), "mask_token_id=97"),
        (
            changed(dflash(), dflash_config={**INNER, "target_layer_ids": [1]}),
            "configured for the hidden states [2], but its weights read 2 of width 32, from 0 to 3",
        ),
        (
            changed(dflash(), dflash_config={**INNER, "target_layer_ids": [1, 3]}),
            "configured for the hidden states [2, 4]",
        ),
        (
            changed(dflash(), dflash_config={**INNER, "target_layer_ids": "all"}),
            "reads the layers 'all'",
        ),
        (
            changed(deepspec(), quantization_config={"quant_algo": "NVFP4"}),
            "is stored quantized (NVFP4), which is not supported",
        ),
        (
            changed(deepspec(), {"layers.0.self_attn.sinks": torch.zeros(4)}),
            "has attention sinks ('layers.0.self_attn.sinks'), which",
        ),
        (
            changed(dflash(), {"layers.1.self_attn.attention_sink_bias": torch.zeros(4)}),
            "has attention sinks ('layers.1.self_attn.attention_sink_bias'), which",
        ),
        (
            changed(dflash2(), dflash_config={**DFLASH2, "selector_top_k": None}),
            "selector_top_k=None, which must be a whole number from 1",
        ),
        (
            changed(dflash2(), {"candidate_selector.successor_codebook": None}),
            "candidate_selector.successor_codebook is missing, not (97, 6)",
        ),
        (
            changed(dflash2(), {"candidate_selector.hidden_projection.weight": None}),
            "candidate_selector.hidden_projection.weight is missing",
        ),
        (
            changed(dflash2(), {"layers.1.mlp_conv.base_kernel": None}),
            "layers.1.mlp_conv.base_kernel is missing, not (2, 2, 32)",
        ),
        (
            changed(dflash2(), {"layers.0.attention_conv.base_kernel": torch.zeros(2, 32)}),
            "layers.0.attention_conv.base_kernel is (2, 32), not (2, 1, 32)",
        ),
        (
            changed(dflash2(), {"layers.0.mlp_conv.kernel_projection.weight": torch.zeros(20, 32)}),
            "layers.0.mlp_conv.kernel_projection.weight is (20, 32), not (16, 32)",
        ),
        (
            changed(dflash2(), {f"layers.0.attention_conv.{PROJECTION}": torch.zeros(20, 32)}),
            "layers.0.attention_conv.kernel_projection.weight is (20, 32), not (4, 32)",
        ),
        (changed(dflash(), layer_types=["full_attention"]), "names 1 layer_types for 2 layers"),
        (changed(dflash(), input_embedding_scale="big"), "input_embedding_scale='big'"),
        (changed(speculators(), {"d2t": torch.arange(60) * 2}), "leads to token 177"),
        (changed(speculators(), {"embed_tokens.weight": None}), "has no 'embed_tokens.weight'"),
        (
            changed(deepspec(confidence=False), {"markov_head.markov_w1.weight": None}),
            "markov_head.markov_w1.weight is missing",
        ),
        (
            changed(deepspec(), {"confidence_head.proj.weight": torch.zeros(1, 99)}),
            "confidence_head.proj.weight is (1, 99)",
        ),
    ],
)
def test_refused(head: PublishedHead, match: str) -> None:
    with pytest.raises(AssistantError, match=re.escape(match)):
        build_block_head(head, MODEL)


def test_the_tensors_of_the_tests_are_those_of_the_papers() -> None:
    """Tensors have the names used on the Hub, and there are no others."""
    layers = {key.split(".", 2)[2] for key in block_tensors() if key.startswith("layers.")}
    assert len(layers) == 11
    assert {k for k in block_tensors() if "layers" not in k} == {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
    }
