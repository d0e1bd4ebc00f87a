"""Interleaved timing: for every prompt and repetition all contenders run, one after the other."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import transformers
from torch import Tensor

from hf_spec.bench.contenders import Contender, Run
from hf_spec.bench.prompts import Prompt
from hf_spec.outputs import SpecStats


@dataclass(frozen=True)
class StrategyStats:
    """The statistics of one generation that a table needs; names as in `SpecStats`."""

    tau: float
    drafted_tokens: int
    draft_forwards: int
    draft_seconds: float
    verify_seconds: float
    other_seconds: float
    accepted_by_position: tuple[int, ...]
    counters: dict[str, int]

    @classmethod
    def of(cls, stats: SpecStats) -> StrategyStats:
        """The part of `stats` that is kept."""
        kept = {field.name: getattr(stats, field.name) for field in fields(cls)}
        return cls(**{**kept, "accepted_by_position": tuple(stats.accepted_by_position)})


@dataclass(frozen=True)
class Record:
    """One timed generation.

    Attributes:
        prompt, task, contender, repeat: which one.
        seconds: wall-clock time of the call.
        plain_seconds: of plain generate on the same prompt in the same repetition.
        new_tokens: tokens generated.
        target_forwards: None where they cannot be counted.
        identical: whether the output equals plain generate's.
        stats: those of our own strategies, None for others.
    """

    prompt: str
    task: str
    contender: str
    repeat: int
    seconds: float
    plain_seconds: float
    new_tokens: int
    target_forwards: int | None
    identical: bool
    stats: StrategyStats | None = None

    @property
    def ratio(self) -> float:
        """Speed relative to plain generate in the same repetition."""
        return self.plain_seconds / self.seconds

    @property
    def tau(self) -> float | None:
        """Accepted draft tokens per target forward, for our own strategies."""
        return None if self.stats is None else self.stats.tau


def measure(
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    tokenizer: Any,
    new_tokens: int,
    repeats: int,
    progress: Callable[[], None] = lambda: None,
) -> Iterator[list[Record]]:
    """Time every contender on every prompt.

    Args:
        contenders: the first one is the reference (plain generate).
        prompts: what to generate from.
        tokenizer: the model's.
        new_tokens: most tokens generated.
        repeats: timed repetitions; the order of the contenders rotates from one to the next.
        progress: called after every generation.

    Yields:
        Prompt by prompt, one record per contender and repetition; a warm-up on the first prompt is
        not timed.
    """
    warm_up = prompts[0].encode(tokenizer)
    for contender in contenders:
        contender.run(warm_up, min(new_tokens, 16))
    for prompt in prompts:
        ids = prompt.encode(tokenizer)
        counts = {c.name: c.count(ids, new_tokens) for c in contenders if c.count is not None}
        records: list[Record] = []
        for repeat in range(repeats):
            runs = _timed(contenders, repeat, ids, new_tokens, progress)
            expected, plain_seconds = runs[contenders[0].name]
            for name, (run, seconds) in runs.items():
                records.append(
                    Record(
                        prompt.id,
                        prompt.task,
                        name,
                        repeat,
                        seconds,
                        plain_seconds,
                        run.sequence.shape[0] - ids.shape[1],
                        counts.get(name, run.target_forwards),
                        torch.equal(run.sequence, expected.sequence),
                        None if run.stats is None else StrategyStats.of(run.stats),
                    )
                )
        yield records


def _timed(
    contenders: Sequence[Contender],
    repeat: int,
    ids: Tensor,
    new_tokens: int,
    progress: Callable[[], None],
) -> dict[str, tuple[Run, float]]:
    """One run of every contender with its seconds, in the order of this repetition."""
    turn = repeat % len(contenders)
    runs = {}
    for contender in [*contenders[turn:], *contenders[:turn]]:
        synchronize()
        start = time.perf_counter()
        run = contender.run(ids, new_tokens)
        synchronize()
        runs[contender.name] = run, time.perf_counter() - start
        progress()
    return runs


def environment() -> dict[str, Any]:
    """What a reader needs to judge the numbers: device, threads and versions."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "device": device or platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def to_json(records: Sequence[Record], **facts: Any) -> dict[str, Any]:
    """Everything measured, with the environment and whatever else is given."""
    return {**facts, "environment": environment(), "records": [asdict(r) for r in records]}


def synchronize() -> None:
    """Wait for the GPU, if there is one, so that a clock sees its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
