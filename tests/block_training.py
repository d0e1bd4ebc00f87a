"""Random heads and single-block references for the tests of DFlash training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedHead
from hf_spec.methods.block.head import BlockHead
from hf_spec.methods.block.settings import BlockTrainSettings
from hf_spec.methods.block.training import new_head
from hf_spec.training.features import Text
from tests.feature_reference import block_outputs

SETTINGS = BlockTrainSettings(
    block_size=4, num_layers=2, anchors=5, vocabulary_size=60, mlp_size=24, held_back=0.4
)
KINDS = ((None, False),) * 2


def published(
    model: PreTrainedModel, texts: list[Text], folder: Path, **more: Any
) -> PublishedHead:
    """Return a head with large random weights and the constants of `block_outputs()`."""
    torch.manual_seed(0)
    made = new_head(model, texts, SETTINGS, folder)
    kept = ("lm_head.weight", "d2t", "t2d")
    tensors = {
        name: tensor if name in kept else tensor + torch.randn(tensor.shape) * 0.2
        for name, tensor in made.tensors.items()
    }
    config = {**made.config, "rope_theta": 5000.0, "rms_norm_eps": 1e-5, **more}
    return replace(made, tensors=tensors, config=config)


def one_block(
    model: PreTrainedModel, head: BlockHead, tokens: list[int], position: int, states: Tensor
) -> Tensor:
    """Return (b, width) outputs of the block whose context ends at a position, in plain torch."""
    weights = {name: weight.detach() for name, weight in head.named_parameters()}
    embedding = model.get_input_embeddings().weight  # type: ignore[union-attr]
    mask = head.shape.mask_token_id
    block = embedding[[tokens[position + 1], *[mask] * (head.shape.block_size - 1)]]
    return block_outputs(weights, states[: position + 1], block, KINDS)
