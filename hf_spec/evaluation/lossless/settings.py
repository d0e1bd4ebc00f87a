"""How much `hf-spec verify` compares: defaults, bounds, and its help."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from hf_spec.common.settings import Count, Internal, Settings, Share, Within


@dataclass(frozen=True)
class SamplingPlan(Settings):
    """What is drawn; the parts of sampling that a strategy does not change.

    Attributes:
        draws: short samples after each of them.
        steps: their length in tokens.
        rows: of one call of generate().
        look_ahead: tokens of the answer among which the place to start is chosen.
        significance: probability of a false alarm, all texts together.
        temperature, seed: of the samples.
    """

    draws: Annotated[int, Within(20)] = 500
    steps: Internal[Count] = 3
    rows: Internal[Count] = 50
    look_ahead: Internal[Count] = 24
    significance: Internal[Share] = 1e-4
    temperature: Annotated[float, Within(0.01)] = 1.0
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of generate() that make it sample."""
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class VerificationPlan(Settings):
    """How much is compared.

    Attributes:
        new_tokens: of each greedy output.
        sampled_prompts: prompts sampled from, the shortest ones; 0 for none.
        sampling: what is drawn.
    """

    new_tokens: Count = 64
    sampled_prompts: Annotated[int, Within(0)] = 4
    sampling: SamplingPlan = field(default_factory=SamplingPlan)
