"""Choice of a published head's layout: the layout it was made with is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import AssistantError
from hf_spec.evaluation.lossless.head_layouts import (
    Agreement,
    Texts,
    choose_layout,
    read_ambiguous_head,
    target_answers,
)
from tests import feature_reference
from tests.published_heads import WIDTH, bare, embeddings, plain_config, sample, save
from tests.tiny_models import VOCAB, build, repetitive_prompt

KEY = "eagle_aux_hidden_state_layer_ids"
# The head below predicts 5t + 3 if its first input is the embedding of token t.
TOKENS = [7, 20]
while len(TOKENS) < 60:
    TOKENS.append((5 * TOKENS[-2] + 3) % VOCAB)
TEXTS = Texts([TOKENS], [4])


def head(layers: list[int]) -> str:
    """Save a head that needs the embeddings as its first layer; its config names `layers`.

    Its attention and its MLP output zeros. Returns the folder.
    """
    tensors = bare(sample("every token").tensors)
    tensors["fc.weight"] = torch.eye(WIDTH, 3 * WIDTH)
    rows = torch.nn.functional.normalize(embeddings(), dim=-1)
    following = (5 * torch.arange(VOCAB) + 3) % VOCAB
    tensors["lm_head.weight"] = torch.zeros_like(rows).index_copy(0, following, rows)
    return save(f"readings{layers[0]}", plain_config(**{KEY: layers}), tensors)


def test_target_answers() -> None:
    texts = target_answers(build("llama"), [repetitive_prompt(9), repetitive_prompt(5)], 20)
    plain = build("llama").generate(repetitive_prompt(9), max_new_tokens=10, do_sample=False)
    assert texts.tokens[0] == plain[0].tolist()
    assert texts.begins == [9, 5]


def test_a_wrong_config() -> None:
    heard: list[Agreement] = []
    best = choose_layout(read_ambiguous_head(head([1, 2, 3])), build("llama"), TEXTS, heard.append)
    assert heard[0].config_overrides == ()
    assert heard[0].share < 0.8
    assert best.config_overrides == (("aux_layers", (0, 1, 2)),)
    assert best.share > 0.95
    assert {one.compared for one in heard} == {len(TOKENS) - 4}
    tried = {name for one in heard for name, _ in one.config_overrides}
    assert tried == {"aux_layers", "embedding", "norm_before_residual"}


def test_a_right_config_is_kept() -> None:
    best = choose_layout(
        read_ambiguous_head(head([0, 1, 2])), build("llama"), TEXTS, lambda one: None
    )
    assert best.config_overrides == ()
    assert best.share > 0.95


def test_a_head_of_another_kind(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    with pytest.raises(AssistantError, match="not a published head; only heads of these families"):
        choose_layout(read_ambiguous_head(str(tmp_path)), build("llama"), TEXTS, print)


def test_a_first_eagle() -> None:
    heard: list[Agreement] = []
    head = read_ambiguous_head(sample("eagle").folder)
    choose_layout(head, build("llama"), Texts([list(range(20))], [4]), heard.append)
    assert [name for one in heard for name, _ in one.config_overrides] == ["embedding"]


def block_head(name: str, outputs: torch.Tensor, config: Any, **tensors: torch.Tensor) -> str:
    """Return the folder of a one-layer block head on embeddings with (V, H) LM head `outputs`."""
    size = feature_reference.SIZE
    mine = bare(feature_reference.block_tensors(1, own=VOCAB))
    mine["fc.weight"] = torch.eye(size, 2 * size)
    mine["embed_tokens.weight"] = embeddings()
    mine["lm_head.weight"] = torch.nn.functional.normalize(outputs, dim=-1)
    for key, tensor in tensors.items():
        mine[f"layers.0.self_attn.{key}.weight"] = tensor
    return save(name, config, mine)


def test_layers_of_a_block_head() -> None:
    """The config's layer ids count layers, although its format uses indices.

    The head predicts the token that it attends to most; its embeddings use half of the dimensions.
    """
    size, half = feature_reference.SIZE, feature_reference.SIZE // 2
    # Two query heads share a KV head; only the first of them is used.
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
    """Each position sees only its own token: the last token's output predicts, not the masks'."""
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
