"""Settings of `hf-spec verify`, from which its help is built."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from hf_spec.common.settings import Count, Internal, Named, Settings, Share, Within


@dataclass(frozen=True)
class SamplingPlan(Settings):
    """Settings of the sampled continuations.

    Attributes:
        draws: samples of three tokens after each sampled prompt.
        steps: tokens of a sample.
        rows: batch size of one generate() call.
        look_ahead: tokens of the answer among which the starting point is chosen.
        significance: probability of a false alarm over all texts.
        temperature: sampling temperature.
        seed: random seed.
    """

    panel = "Checks"

    draws: Annotated[int, Within(20)] = 500
    steps: Internal[Count] = 3
    rows: Internal[Count] = 50
    look_ahead: Internal[Count] = 24
    significance: Internal[Share] = 1e-4
    temperature: Annotated[float, Within(0.01)] = 1.0
    seed: int = 0

    @property
    def options(self) -> dict[str, Any]:
        """Sampling arguments of generate()."""
        return {"do_sample": True, "temperature": self.temperature, "top_k": 0, "top_p": 1.0}


@dataclass(frozen=True)
class VerificationPlan(Settings):
    """Extent of a verification.

    Attributes:
        new_tokens: maximum new tokens of a greedy output.
        sampled_prompts: prompts to sample after, the shortest ones; 0 for none.
        sampling: settings of the samples.
    """

    panel = "Checks"

    new_tokens: Annotated[Count, Named("max_new_tokens")] = 64
    sampled_prompts: Annotated[int, Within(0)] = 4
    sampling: SamplingPlan = field(default_factory=SamplingPlan)
