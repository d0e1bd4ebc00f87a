"""Ambiguous options of each family of heads: the value that drafts best is chosen."""

from __future__ import annotations

from typing import Any

import torch

from hf_spec.evaluation.lossless.head_layouts import (
    Agreement,
    Texts,
    choose_layout,
    read_ambiguous_head,
)
from tests import feature_reference
from tests.published_heads import bare, embeddings, sample, save
from tests.tiny_models import VOCAB, build


def test_a_first_eagle() -> None:
    heard: list[Agreement] = []
    head = read_ambiguous_head(sample("eagle").folder)
    choose_layout(head, build("llama"), Texts([list(range(20))], [4]), heard.append)
    assert [name for one in heard for name, _ in one.config_overrides] == ["embedding"]


def block_head(name: str, outputs: torch.Tensor, config: Any, **tensors: torch.Tensor) -> str:
    """Folder of a block head of one layer that reads the embeddings; (V, H) `outputs` score."""
    size = feature_reference.SIZE
    mine = bare(feature_reference.block_tensors(1, own=VOCAB))
    mine["fc.weight"] = torch.eye(size, 2 * size)
    mine["embed_tokens.weight"] = embeddings()
    mine["lm_head.weight"] = torch.nn.functional.normalize(outputs, dim=-1)
    for key, tensor in tensors.items():
        mine[f"layers.0.self_attn.{key}.weight"] = tensor
    return save(name, config, mine)


def test_layers_of_a_block_head() -> None:
    """Ids that count layers, in a config whose ids are indices.

    The head says what it sees most of in half the numbers of an embedding.
    """
    size, half = feature_reference.SIZE, feature_reference.SIZE // 2
    # A head of keys serves two heads; the first of them is taken.
    seen = torch.zeros(size, size)
    for index in range(half):
        seen[index, index % 8 + index // 8 * 16] = 10.0
    folder = block_head(
        "block-layers",
        embeddings() * (torch.arange(size) < half),
        {**feature_reference.deepspec(None).config, "target_layer_ids": [0, 1]},
        v_proj=torch.eye(half, size),
        o_proj=seen,
    )
    texts = Texts([[token] * 30 for token in (9, 30, 51, 77)], [20] * 4)
    heard: list[Agreement] = []
    best = choose_layout(read_ambiguous_head(folder), build("llama"), texts, heard.append)
    assert heard[0].share < 0.5
    assert best.config_overrides == (("aux_layers", (0, 1)),)
    assert best.share > 0.95
    assert best.config == "BlockConfig"
    tried = {name for one in heard for name, _ in one.config_overrides}
    assert tried == {"aux_layers", "from_anchor", "embedding_scale"}


def test_what_an_output_of_a_block_head_drafts() -> None:
    """A place knows its own token alone: the last one tells what follows, a mask does not."""
    following = (5 * torch.arange(VOCAB) + 3) % VOCAB
    outputs = torch.zeros_like(embeddings()).index_copy(0, following, embeddings())
    folder = block_head("block-anchor", outputs, feature_reference.dflash().config)
    tokens = [7]
    while len(tokens) < 40:
        tokens.append(int(following[tokens[-1]]))
    best = choose_layout(
        read_ambiguous_head(folder), build("llama"), Texts([tokens], [1]), lambda one: None
    )
    assert best.config_overrides == (("from_anchor", True),)
    assert best.share > 0.95
