"""Settings of adaptive tokens and their training."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, get_args

from hf_spec.common.errors import OptionError
from hf_spec.common.settings import Count, Internal, Named, Settings, Share, Weight, Within
from hf_spec.training.settings import Training, TrainSettings

# Trained weights; see `hf_spec.methods.sdsat.adaptive_tokens`.
Mode = Literal["gated", "embeddings", "lora", "full"]
MODES: tuple[Mode, ...] = get_args(Mode)
# Modes that leave the weights and the output of the base model unchanged.
FROZEN_BASE = ("gated", "embeddings")
# Prefix, suffix and middle marker of the infilling format.
NUM_MARKERS = 3
# 400 of 2,000 warm-up steps in the paper (section 3.2). The peak rate depends on the mode.
SDSAT_RUN = TrainSettings(warm_up=0.2, learning_rate=None)
# Peak learning rate by mode; that of "full" is the paper's.
LEARNING_RATES: dict[Mode, float] = {"gated": 1e-3, "embeddings": 1e-3, "lora": 1e-3, "full": 5e-5}


@dataclass(frozen=True)
class SdsatTrainSettings(Settings):
    """Kind and loss of adaptive tokens; `hf_spec.methods.sdsat.training` explains the choices.

    Attributes:
        mode: trained weights. See hf_spec.methods.sdsat.adaptive_tokens.
        window: maximum consecutive tokens. It is the paper's L.
        diverse: one adaptive token per slot of the window. Otherwise one for all slots.
        rank: rank of the LoRA.
        targets: layer with a LoRA, such as q_proj. Default: all linear layers.
        loss: equation 9, or 8 (basic). They are the paper's.
        layout: windows branch off the text, or replace tokens in it. Default: by mode and loss.
        start_share: share of positions with windows. Only positions of the answer start a window.
        adaptive_weight: weight of adaptive positions. Relative to clean text; w of equation 9.
        soft_weight: weight of target distributions. Of the cross-entropy with them, 0 to 1.
        infilling: share of code to infill. One half is PSM, the other SPM; the paper has
            0.5.
        infilling_task: task whose answers are code.
        infilling_markers: prefix, suffix, middle marker, in order. They are tokens of the
            vocabulary. Default: the tokenizer's.
        num_adaptive: adaptive tokens per draft. Default: --window.
        token_ids: spare vocabulary row for mode full. Default: new rows.
        held_back: share of the prompts that are held out, chosen by a hash of their ids.
        evaluated_positions: positions per held-out answer after which adaptive tokens are
            evaluated.
    """

    panel = "Adaptive tokens"
    other_panels: ClassVar = {
        "Loss": (
            *("loss", "layout", "start_share", "adaptive_weight", "soft_weight"),
            *("infilling", "infilling_task", "infilling_markers"),
        )
    }

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
        """True if the base keeps its weights and its output."""
        return self.mode in FROZEN_BASE

    @property
    def chosen_layout(self) -> str:
        """Layout, with the default resolved."""
        default = "branches" if self.frozen and self.loss == "improved" else "replaced"
        return self.layout or default

    def resolved_run(self, run: TrainSettings) -> TrainSettings:
        """Return settings of the training loop with the mode's learning rate if they have none."""
        default = run.learning_rate is None
        return replace(run, learning_rate=LEARNING_RATES[self.mode]) if default else run

    @property
    def num_kinds(self) -> int:
        """Number of different adaptive tokens."""
        return self.window if self.diverse else 1


TRAINING = Training(
    name="sdsat",
    settings=SdsatTrainSettings,
    run=SDSAT_RUN,
    teacher=True,
    function="hf_spec.methods.sdsat.training:run_training",
    result="the result",
    strategy="sdsat",
    help="""Train adaptive tokens, after which the target drafts for itself.

    Modes gated and embeddings leave the target's output unchanged; lora and full train another
    model, full in OUT itself. The learning rate is 0.001 by default, 5e-5 for full. Target
    distributions are stored for --soft-weight only. Use it with
    generate(..., spec_strategy="sdsat", assistant=OUT).

        hf-spec train sdsat MODEL --responses answers.jsonl --out my-tokens
    """,
)
