"""Interleaved timing: for every batch and repetition all contenders run, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from hf_spec.common.outputs import SpecStats
from hf_spec.common.prompts import Batch, Prompt, make_batches
from hf_spec.evaluation.bench.contenders import Contender, Run
from hf_spec.evaluation.bench.known_answers import PlainAnswers
from hf_spec.evaluation.bench.timing import peak_bytes, reset_peak, timed

CPU = torch.device("cpu")
WARM_UP_TOKENS = 16
# What a file keeps of the statistics of a generation.
KEPT_STATS = (
    "tau",
    "drafted_tokens",
    "draft_forwards",
    "draft_seconds",
    "verify_seconds",
    "other_seconds",
    "accepted_by_position",
    "counters",
    "drafted_by_position",
)


@dataclass(frozen=True)
class Row:
    """One output of a batch, and whether the reference says the same; None if it is sampled."""

    prompt: str
    task: str
    identical: bool | None


@dataclass(frozen=True)
class Record:
    """One timed generation.

    Attributes:
        prompt, task: of a batch the ids joined by "+", and "mixed" if tasks differ.
        seconds: wall-clock time of the call.
        plain_seconds: what plain generate took on the same batch in the same repetition, times the
            share of its tokens that this one made: 1 where outputs are equal.
        new_tokens: generated, all rows together, without the padding after their ends.
        target_forwards: None where they cannot be counted.
        identical: whether every output is what it should be; None if outputs are sampled.
        stats: those of our own strategies, None for others.
        rows: the outputs one by one.
        peak_bytes: see `hf_spec.evaluation.bench.timing`.
    """

    prompt: str
    task: str
    contender: str
    repeat: int
    seconds: float
    plain_seconds: float
    new_tokens: int
    target_forwards: int | None
    identical: bool | None
    stats: SpecStats | None = None
    batch_size: int = 1
    rows: tuple[Row, ...] = ()
    peak_bytes: int | None = None

    @property
    def ratio(self) -> float:
        """Speed relative to plain generate in the same repetition."""
        return self.plain_seconds / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows together over the time of the call."""
        return self.new_tokens / self.seconds

    @property
    def tau(self) -> float | None:
        """Accepted draft tokens per target forward, for our own strategies."""
        return None if self.stats is None else self.stats.tau

    def to_dict(self) -> dict[str, Any]:
        """JSON values, with `KEPT_STATS` of the statistics."""
        stats = self.stats and {name: getattr(self.stats, name) for name in KEPT_STATS}
        return {**asdict(replace(self, stats=None)), "stats": stats}


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        new_tokens: most tokens generated per row.
        repeats: timed repetitions; the order of the contenders rotates from one to the next.
        seed: of sampled outputs, which are not compared; None for greedy ones.
        ends: tokens that end a sequence; what follows is padding.
        device: whose memory is watched.
    """

    new_tokens: int
    repeats: int
    batch_size: int = 1
    seed: int | None = None
    ends: frozenset[int] = frozenset()
    device: torch.device = CPU


def time_contenders(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    tokenizer: Any,
    plan: Plan,
    progress: Callable[[], object] = lambda: None,
) -> Iterator[list[Record]]:
    """Time every contender on every batch of prompts.

    The first contender, plain generate, is the reference. Outputs are compared with its own: in the
    same repetition, or, if there are several rows, with what it says to each prompt alone.
    `progress` is called after every generation.

    Yields:
        Batch by batch, one record per contender and repetition; a warm-up on the widest batch, in
        which layers on a CPU are compiled, is not timed.
    """
    batches = make_batches(prompts, tokenizer, plan.batch_size)
    widest = max(batches, key=lambda batch: batch.ids.shape[1])
    answers, sampled = PlainAnswers(contenders[0]), plan.seed is not None
    for contender in contenders:
        tokens = plan.new_tokens if contender.compiles else min(plan.new_tokens, WARM_UP_TOKENS)
        contender.run(widest.ids, tokens, widest.mask)
    for batch in batches:
        call = batch.ids, plan.new_tokens, batch.mask
        counts = {c.name: c.prepare(*call) for c in contenders if c.prepare is not None}
        compared = plan.batch_size > 1 and not sampled
        alone = _until_end(answers(*call), plan.ends) if compared else None
        records: list[Record] = []
        for repeat in range(plan.repeats):
            runs = _in_turn(contenders, repeat, batch, plan, progress)
            reference = runs[contenders[0].name]
            for name, run in runs.items():
                outputs = zip(run.outputs, alone or reference.outputs, strict=True)
                same = [None if sampled else output == right for output, right in outputs]
                named = zip(batch.prompts, same, strict=True)
                record = Record(
                    batch.name,
                    batch.task,
                    name,
                    repeat,
                    run.seconds,
                    reference.seconds * run.new_tokens / reference.new_tokens,
                    run.new_tokens,
                    counts.get(name) or run.run.target_forwards,
                    None if sampled else all(same),
                    run.run.stats,
                    plan.batch_size,
                    tuple(Row(prompt.id, prompt.task, right) for prompt, right in named),
                    run.peak_bytes,
                )
                records.append(record)
        yield records


@dataclass(frozen=True)
class _Timed:
    """A run, the new tokens of each row, and what it took."""

    run: Run
    outputs: list[list[int]]
    seconds: float
    peak_bytes: int | None

    @property
    def new_tokens(self) -> int:
        return sum(map(len, self.outputs))


def _in_turn(
    contenders: Sequence[Contender],
    repeat: int,
    batch: Batch,
    plan: Plan,
    progress: Callable[[], object],
) -> dict[str, _Timed]:
    """One run of every contender, in the order of this repetition."""
    turn = repeat % len(contenders)
    found = {}
    for contender in [*contenders[turn:], *contenders[:turn]]:
        if plan.seed is not None:
            torch.manual_seed(plan.seed + repeat)
        reset_peak(plan.device)
        run, seconds = timed(partial(contender.run, batch.ids, plan.new_tokens, batch.mask))
        outputs = _until_end(run.sequences[:, batch.ids.shape[1] :].tolist(), plan.ends)
        found[contender.name] = _Timed(run, outputs, seconds, peak_bytes(plan.device))
        progress()
    return found


def _until_end(rows: list[list[int]], ends: frozenset[int]) -> list[list[int]]:
    """The tokens of each row up to its end."""
    lengths = (next((i for i, t in enumerate(row) if t in ends), len(row)) for row in rows)
    return [row[: length + 1] for row, length in zip(rows, lengths, strict=True)]
