"""What the trained parts are built from, known without torch: settings and their help need it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from hf_spec.common.errors import OptionError
from hf_spec.common.settings import Count, Internal, Named, Settings, Share, Within

# What is trained of adaptive tokens; see `hf_spec.methods.sdsat.adaptive_tokens` for what they mean.
Mode = Literal["gated", "embeddings", "lora", "full"]
MODES: tuple[Mode, ...] = get_args(Mode)

# How many probabilities DISCO's classifier sees, and the groups of all its features.
TOP = 10
FEATURES = {"top_probs": slice(0, TOP), "entropy": slice(TOP, TOP + 1), "position": slice(-1, None)}


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """Indices into `hidden_states` that heads read where nothing is said: low, middle, high."""
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True)
class FalconShape(Settings):
    """What a Falcon head is built from.

    Attributes:
        block_size: tokens drafted per pass, k.
        num_layers: attention layers of the head, copies of the target's last ones before training.
        recurrent: carry the LSTM's state along the text, as in the paper; the released code begins
            again at every pair.
        fused: read three earlier states of the target as well, as EAGLE-3 does (Li et al. 2025,
            arXiv 2503.01840); the paper reads the last one.
        dropout: between the LSTM layers, in training.
    """

    block_size: Annotated[int, Within(1, 4)] = 2
    num_layers: Annotated[Count, Named("layers")] = 1
    recurrent: bool = False
    fused: bool = False
    dropout: Internal[Share] = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dropout == 1:
            raise OptionError(f"dropout={self.dropout!r} must be below 1")
