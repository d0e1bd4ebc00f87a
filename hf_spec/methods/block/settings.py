"""Settings for training DFlash heads."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from hf_spec.common.settings import Count, PositiveWeight, Within
from hf_spec.training.settings import DraftVocabularySettings, StartOptions, Training, TrainSettings

BLOCK_RUN = TrainSettings(epochs=6)


@dataclass(frozen=True)
class BlockTrainSettings(DraftVocabularySettings):
    """Settings of a DFlash head and its loss.

    Attributes:
        block_size: positions of a block. The first one is the last known token.
        num_layers: layers of the head.
        anchors: blocks per text and epoch. They start at random positions of the answer.
        decay: draft tokens in which the loss weight falls by a factor of e.
        mlp_size: width of the MLP. Default: the target's.
        mask_token: token id at the positions to draft. Default: the last one.
    """

    block_size: Annotated[int, Within(2)] = 8
    num_layers: Count = 2
    anchors: Count = 32
    decay: PositiveWeight = 4.0
    mlp_size: Count | None = None
    mask_token: int | None = None


TRAINING = Training(
    name="block",
    settings=BlockTrainSettings,
    run=BLOCK_RUN,
    features="fused",
    options=StartOptions,
    function="hf_spec.methods.block.training:run_training",
    result="the head",
    strategy="block",
    help="""Train a DFlash head, in the layout of vLLM's speculators.

    It drafts a block of tokens in one pass. Hidden states of four layers of the target are computed
    first for all texts, once, and stored beside the answers; train eagle uses the same. Use the
    head with model.generate(..., spec_strategy="block", assistant=OUT).

        hf-spec train block MODEL --responses answers.jsonl --out my-head --block-size 8
    """,
)
