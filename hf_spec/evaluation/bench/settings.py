"""What benchmarks and calibrations measure: defaults, bounds, and the help of their commands."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from hf_spec.common.errors import OptionError
from hf_spec.common.settings import Count, Internal, Named, Settings, Share, Weight, Within


@dataclass(frozen=True)
class Suite(Settings):
    """What a benchmark measures, and how.

    Attributes:
        batch_sizes: rows of a call.
        new_tokens: at most, per row.
        repeats: timed repetitions.
        sample: sampled outputs are not compared.
        temperature: with --sample; 1 by default.
        seed: with --sample.
        baselines: also measure the lookups and assistants of others.
        compiled: also plain generate, static cache and compiled.
        match_length: n-gram of the others' lookups.
        copy_length: tokens that these copy.
        oracle: a draft model: chains of it that end where they must.
        synthetic_acceptance: also drafts that are right with this probability, of no drafter.
        synthetic_length: tokens of such a draft.
        multi_turn: all turns of a prompt, as a conversation.
        profile: also where the time of a step goes.
        step_cost: also forwards by number of nodes.
    """

    batch_sizes: Annotated[tuple[Count, ...], Named("batch")] = (1,)
    new_tokens: Count = 64
    repeats: Count = 3
    sample: Annotated[bool, Named("sample", off="greedy")] = False
    temperature: Annotated[float | None, Within(0.01)] = None
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
        if self.temperature is not None and not self.sample:
            raise OptionError(f"--temperature {self.temperature} needs --sample")
        knowing = {"oracle": self.oracle, "synthetic acceptance": self.synthetic_acceptance}
        for name, value in knowing.items():
            if value is not None and self.sample:
                raise OptionError(
                    f"{name} drafts what greedy decoding will say, which sampling does not; choose "
                    "greedy decoding"
                )


@dataclass(frozen=True)
class CalibrationSettings(Settings):
    """The grid of DISCO's options and how it is measured.

    Attributes:
        thresholds: acceptance thresholds to be tried (the paper's tau).
        longest: longest drafts to be tried (the paper's SL_max).
        static_lengths: lengths of the static baseline.
        reference: the static length that every speed is relative to.
        new_tokens: generated per run.
        repeats: runs of each way and prompt.
        judge: what the best is chosen by, its time or, where the machine has other work, the number
            of its forwards, those of a kind at one price.
        seconds: begin no further prompt after these; None takes all.
    """

    thresholds: Annotated[tuple[Share, ...], Named("threshold")] = (0.2, 0.35, 0.5, 0.65, 0.8)
    longest: tuple[Count, ...] = (5, 8, 12)
    static_lengths: Internal[tuple[Count, ...]] = (1, 2, 3, 4, 5, 6, 8)
    reference: Internal[Count] = 5
    new_tokens: Count = 64
    repeats: Count = 2
    judge: Literal["time", "forwards"] = "time"
    seconds: Weight | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("thresholds", "longest", "static_lengths"):
            if not getattr(self, name):
                raise OptionError(f"{name} is empty; give at least one value")

    @property
    def num_ways(self) -> int:
        """How many ways to generate are compared, the reference included."""
        return 1 + len(self.thresholds) * len(self.longest) + len(self.static_lengths)


@dataclass(frozen=True)
class TreeSettings(Settings):
    """What is measured for the tree of a Falcon head.

    Attributes:
        depth: of the deepest path tried.
        num_ranks: length of the lists that count.
        max_nodes: most that are sent to the target.
        drafted_nodes: sizes of trees that are drafted whole and sent in part.
        generations: from which these are judged.
        node_counts: sizes of the timed trees; `max_nodes` is always one, larger ones are left out.
        new_tokens: generated per timed run.
        repeats: timed runs of each tree.
    """

    depth: Count = 6
    num_ranks: Count = 8
    max_nodes: Count = 40
    drafted_nodes: tuple[Count, ...] = (24, 48)
    generations: Count = 8
    node_counts: Internal[tuple[Count, ...]] = (1, 3, 7, 11, 15, 23, 31, 40)
    new_tokens: Annotated[int, Within(2)] = 32
    repeats: Count = 3
