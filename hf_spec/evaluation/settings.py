"""Settings of evaluations, from which their commands build the help."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from hf_spec.common.errors import OptionError
from hf_spec.common.settings import Count, Internal, Named, Settings, Share, Weight, Within


@dataclass(frozen=True)
class Suite(Settings):
    """Settings of a benchmark.

    Attributes:
        batch_sizes: prompts per batch.
        new_tokens: maximum new tokens per prompt.
        repeats: timed repetitions.
        sample: sample instead of greedy decoding. Sampled outputs are not compared.
        temperature: temperature (with --do-sample). Default: 1.
        top_k: top-k (with --do-sample). Default: the model's. 0 is for all tokens.
        top_p: top-p (with --do-sample). Default: the model's. It is between 0 and 1.
        seed: random seed (with --do-sample).
        baselines: also measure other packages. They have lookup and assisted decoding.
        compiled: also measure compiled generate(). It has a static cache.
        match_length: tokens that other lookups match.
        copy_length: tokens that other lookups copy.
        oracle: draft model cut at the first mismatch.
        synthetic_acceptance: made-up drafts: acceptance rate, 0 to 1.
        synthetic_length: made-up drafts: tokens.
        multi_turn: run all turns of a prompt as a conversation.
        profile: also measure the parts of a decoding step.
        step_cost: also measure forward passes by number of nodes.
    """

    panel = "Measurement"
    other_panels: ClassVar = {
        "Other contenders": (
            *("baselines", "compiled", "match_length", "copy_length", "oracle"),
            *("synthetic_acceptance", "synthetic_length"),
        )
    }

    batch_sizes: Annotated[tuple[Count, ...], Named("batch_size")] = (1,)
    new_tokens: Annotated[Count, Named("max_new_tokens")] = 64
    repeats: Count = 3
    sample: Annotated[bool, Named("do_sample")] = False
    temperature: Annotated[float | None, Within(0.01)] = None
    top_k: Annotated[int | None, Within(0)] = None
    top_p: Share | None = None
    seed: int = 0
    baselines: bool = True
    compiled: bool = False
    match_length: Count = 2
    copy_length: Count = 10
    oracle: str | None = None
    synthetic_acceptance: Share | None = None
    synthetic_length: Count = 5
    multi_turn: bool = False
    profile: bool = False
    step_cost: Internal[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        sampling = {"temperature": self.temperature, "top-k": self.top_k, "top-p": self.top_p}
        for name, number in sampling.items():
            if number is not None and not self.sample:
                raise OptionError(f"--{name} {number} needs --do-sample")
        greedy_only = {"oracle": self.oracle, "synthetic acceptance": self.synthetic_acceptance}
        for name, value in greedy_only.items():
            if value is not None and self.sample:
                raise OptionError(
                    f"{name} drafts from the greedy output, which sampling does not follow; choose "
                    "greedy decoding"
                )


@dataclass(frozen=True)
class CalibrationSettings(Settings):
    """Grid of DISCO's options and how it is measured.

    Attributes:
        thresholds: acceptance threshold to try, 0 to 1. It is the paper's tau.
        longest: maximum draft length to try, in tokens. It is the paper's SL_max.
        static_lengths: lengths of the static baseline.
        reference: static length that every speedup is relative to.
        new_tokens: maximum new tokens per run.
        repeats: runs of each contender and prompt.
        judge: figure that selects the best. On a busy machine use forwards: forward passes at their
            median cost.
        seconds: start no further prompt after this time, in seconds. Default: no limit.
    """

    panel = "Measurement"

    thresholds: Annotated[tuple[Share, ...], Named("threshold")] = (0.2, 0.35, 0.5, 0.65, 0.8)
    longest: Annotated[tuple[Count, ...], Named("max_draft_tokens")] = (5, 8, 12)
    static_lengths: Internal[tuple[Count, ...]] = (1, 2, 3, 4, 5, 6, 8)
    reference: Internal[Count] = 5
    new_tokens: Annotated[Count, Named("max_new_tokens")] = 64
    repeats: Count = 2
    judge: Literal["time", "forwards"] = "time"
    seconds: Weight | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("thresholds", "longest", "static_lengths"):
            if not getattr(self, name):
                raise OptionError(f"{name} is empty; give at least one value")

    @property
    def num_contenders(self) -> int:
        """Number of contenders, including the reference."""
        return 1 + len(self.thresholds) * len(self.longest) + len(self.static_lengths)


@dataclass(frozen=True)
class TreeSettings(Settings):
    """Measurements for the tree of a Falcon head.

    Attributes:
        depth: maximum depth of a path, in tokens.
        num_ranks: ranks per position that a path may use.
        max_nodes: maximum nodes sent to the target.
        drafted_nodes: nodes of a tree that is drafted fully and sent in part.
        generations: generations that measure these trees.
        node_counts: sizes of the timed trees; `max_nodes` is added, larger ones are dropped.
        new_tokens: maximum new tokens per timed run.
        repeats: timed runs of each tree.
    """

    panel = "Measurement"

    depth: Count = 6
    num_ranks: Count = 8
    max_nodes: Count = 40
    drafted_nodes: tuple[Count, ...] = (24, 48)
    generations: Count = 8
    node_counts: Internal[tuple[Count, ...]] = (1, 3, 7, 11, 15, 23, 31, 40)
    new_tokens: Annotated[int, Within(2), Named("max_new_tokens")] = 32
    repeats: Count = 3


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
