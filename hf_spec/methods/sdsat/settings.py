"""Settings of the training of adaptive tokens."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from hf_spec.common.errors import OptionError
from hf_spec.common.settings import Count, Internal, Named, Settings, Share, Weight, Within
from hf_spec.training.settings import TrainSettings

# What is trained; see `hf_spec.methods.sdsat.adaptive_tokens`.
Mode = Literal["gated", "embeddings", "lora", "full"]
MODES: tuple[Mode, ...] = get_args(Mode)
# Modes that leave the weights and the output of the base model unchanged.
FROZEN_BASE = ("gated", "embeddings")
# Prefix, suffix and middle marker of the infilling format.
NUM_MARKERS = 3
# 400 of 2,000 steps in the paper (section 3.2).
SDSAT_RUN = TrainSettings(warm_up=0.2)


@dataclass(frozen=True)
class SdsatTrainSettings(Settings):
    """Adaptive tokens to train; `hf_spec.methods.sdsat.training` explains the choices.

    Attributes:
        mode: what learns; see hf_spec.methods.sdsat.adaptive_tokens.
        window: most adaptive tokens in a row, L.
        diverse: one adaptive token per place, not one for all.
        rank: rank of the LoRA.
        targets: layers that get a LoRA, such as q_proj; all linear ones by default.
        loss: equation 9 of the paper (improved), or equation 8 (basic).
        layout: windows branch off the clean text, or replace tokens in it; chosen by mode and loss
            by default.
        start_share: of the answer's positions, where windows start.
        adaptive_weight: of the adaptive positions beside the clean text, w of equation 9.
        soft_weight: share of the cross-entropy with the target's own distribution.
        infilling: share of the code put into infilling format, one half PSM and one half SPM; 0.5
            in the paper.
        infilling_task: which answers are code.
        infilling_markers: prefix, suffix and middle marker, tokens of the vocabulary; by default
            the tokenizer's own.
        num_adaptive: adaptive tokens that decoding takes if it is told none; the window by default.
        token_ids: spare rows of the vocabulary, for mode full; new ones are appended by default.
        held_back: share of the prompts kept for evaluation, chosen by a hash of their ids.
        evaluated_positions: per held-back answer, after which adaptive tokens are tried.
    """

    mode: Mode = "gated"
    window: Count = 5
    diverse: bool = False
    rank: Count = 16
    targets: Annotated[tuple[str, ...], Named("lora_layer")] = ()
    loss: Literal["improved", "basic"] = "improved"
    layout: Literal["branches", "replaced"] | None = None
    start_share: Share = 0.1
    adaptive_weight: Weight = 1.0
    soft_weight: Share = 0.0
    infilling: Share = 0.0
    infilling_task: str = "code"
    infilling_markers: Annotated[tuple[str, ...], Named("infilling_marker")] = ()
    num_adaptive: Count | None = None
    token_ids: Annotated[tuple[int, ...], Named("token_id"), Within(0)] = ()
    held_back: Internal[Share] = 0.03
    evaluated_positions: Internal[Count] = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chosen_layout == "branches" and (self.loss == "basic" or not self.frozen):
            raise OptionError(
                f"layout='branches' keeps the text clean, which loss={self.loss!r} in mode "
                f"{self.mode!r} cannot use; choose layout='replaced'"
            )
        if self.token_ids and len(self.token_ids) != self.num_kinds:
            raise OptionError(
                f"token_ids={self.token_ids}: {self.num_kinds} adaptive tokens are needed"
            )
        if self.infilling_markers and len(set(self.infilling_markers)) != NUM_MARKERS:
            raise OptionError(
                f"infilling_markers={self.infilling_markers}: {NUM_MARKERS} different tokens are "
                "needed, for prefix, suffix and middle"
            )

    @property
    def frozen(self) -> bool:
        """Whether the base keeps its weights and its output."""
        return self.mode in FROZEN_BASE

    @property
    def chosen_layout(self) -> str:
        """The layout, the default one if none was named."""
        usual = "branches" if self.frozen and self.loss == "improved" else "replaced"
        return self.layout or usual

    @property
    def num_kinds(self) -> int:
        """How many different adaptive tokens there are."""
        return self.window if self.diverse else 1
