"""Interleaved timing: for every batch and repetition, all contenders run one after the other."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from hf_spec.common.outputs import SpecStats
from hf_spec.common.prompts import Batch, Prompt, make_batches
from hf_spec.evaluation.bench.contenders import BaselineOutputs, Contender, Run
from hf_spec.training.responses import until_end

CPU = torch.device("cpu")
WARM_UP_TOKENS = 16
Item = TypeVar("Item")
Result = TypeVar("Result")
# Linux: writing 5 here resets the peak of this process; the status file has the peak since then.
_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
# Statistics of a generation that are written to a results file.
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
    """One output of a batch; `identical` to the reference, or None if sampled."""

    prompt: str
    task: str
    identical: bool | None


@dataclass(frozen=True)
class Record:
    """One timed generation.

    Attributes:
        prompt, task: for a batch the ids joined by "+", and "mixed" if tasks differ.
        seconds: wall-clock time of the call.
        plain_seconds: time of plain `generate()` on the same batch in the same repetition, times
            the ratio of the numbers of new tokens, which is 1 for equal outputs.
        new_tokens: generated tokens of all rows, without padding.
        target_forwards: None if they cannot be counted.
        identical: True if every output equals the reference; None if outputs are sampled.
        stats: statistics of our strategies, None for other contenders.
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
        """Speedup over plain `generate()` in the same repetition."""
        return self.plain_seconds / self.seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all rows divided by the time of the call."""
        return self.new_tokens / self.seconds

    @property
    def tau(self) -> float | None:
        """Accepted draft tokens per target forward, for our own strategies."""
        return None if self.stats is None else self.stats.tau

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; of the statistics only `KEPT_STATS`."""
        stats = self.stats and {name: getattr(self.stats, name) for name in KEPT_STATS}
        return {**asdict(replace(self, stats=None)), "stats": stats}


@dataclass(frozen=True)
class Plan:
    """Extent of a measurement with at most `new_tokens` per row.

    The order of the contenders rotates between the `repeats` timed repetitions. `seed` is that of
    sampled outputs, which are not compared; None for greedy ones. Padding follows the
    end-of-sequence tokens `ends`. The peak memory of `device` is recorded.
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
    """Time every contender on every batch; yield one record per contender and repetition.

    The first contender, plain `generate()`, is the reference. Outputs are compared with its output
    in the same repetition, or, for several rows, with its output for each prompt alone. An untimed
    warm-up on the widest batch compiles layers. `progress` is called after every
    generation.
    """
    batches = make_batches(prompts, tokenizer, plan.batch_size)
    widest = max(batches, key=lambda batch: batch.ids.shape[1])
    baseline, sampled = BaselineOutputs(contenders[0]), plan.seed is not None
    for contender in contenders:
        tokens = plan.new_tokens if contender.compiles else min(plan.new_tokens, WARM_UP_TOKENS)
        contender.run(widest.ids, tokens, widest.mask)
    for batch in batches:
        call = batch.ids, plan.new_tokens, batch.mask
        counts = {c.name: c.prepare(*call) for c in contenders if c.prepare is not None}
        compared = plan.batch_size > 1 and not sampled
        single = [until_end(row, plan.ends) for row in baseline(*call)] if compared else None
        records: list[Record] = []
        for repeat in range(plan.repeats):
            runs = _in_turn(contenders, repeat, batch, plan, progress)
            reference = runs[contenders[0].name]
            for name, run in runs.items():
                outputs = zip(run.outputs, single or reference.outputs, strict=True)
                equal = [None if sampled else output == right for output, right in outputs]
                by_prompt = zip(batch.prompts, equal, strict=True)
                record = Record(
                    batch.name,
                    batch.task,
                    name,
                    repeat,
                    run.seconds,
                    plain_seconds=reference.seconds * run.new_tokens / reference.new_tokens,
                    new_tokens=run.new_tokens,
                    target_forwards=counts.get(name) or run.run.target_forwards,
                    identical=None if sampled else all(equal),
                    stats=run.run.stats,
                    batch_size=plan.batch_size,
                    rows=tuple(Row(prompt.id, prompt.task, same) for prompt, same in by_prompt),
                    peak_bytes=run.peak_bytes,
                )
                records.append(record)
        yield records


@dataclass(frozen=True)
class _Timed:
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
    """Run every contender once, in the order of this repetition."""
    runs = {}
    for contender in rotated(contenders, repeat):
        if plan.seed is not None:
            torch.manual_seed(plan.seed + repeat)
        reset_peak(plan.device)
        run, seconds = timed(partial(contender.run, batch.ids, plan.new_tokens, batch.mask))
        rows = run.sequences[:, batch.ids.shape[1] :].tolist()
        outputs = [until_end(row, plan.ends) for row in rows]
        runs[contender.name] = _Timed(run, outputs, seconds, peak_bytes(plan.device))
        progress()
    return runs


def rotated(items: Sequence[Item], turn: int) -> list[Item]:
    """Return the items in the order of a turn: over turns, each is first, and last, equally often.

    The first timed call after another one may find cold caches, or a machine that got slower.
    """
    start = turn % len(items)
    return [*items[start:], *items[:start]]


def timed(
    call: Callable[[], Result], clock: Callable[[], float] = time.perf_counter
) -> tuple[Result, float]:
    """Return the result of `call` and its seconds; waits for a GPU before and after."""
    synchronize()
    start = clock()
    result = call()
    synchronize()
    return result, clock() - start


def synchronize() -> None:
    """Wait for the GPU, if there is one, so that its work is included in a timing."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def reset_peak(device: torch.device) -> None:
    """Reset the peak of `peak_bytes`."""
    memory: Any = getattr(torch, device.type, None)
    if hasattr(memory, "reset_peak_memory_stats"):
        memory.reset_peak_memory_stats(device)
    elif _RESET.exists():
        _RESET.write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory in bytes since `reset_peak`, None where it is not available.

    On a GPU this is what the allocator held; on a CPU, the resident memory of the process. A
    process keeps freed memory, so a CPU figure includes all models of the benchmark and what other
    contenders cache. Only differences between runs show what one contender needs.
    """
    memory: Any = getattr(torch, device.type, None)
    if hasattr(memory, "max_memory_allocated"):
        return int(memory.max_memory_allocated(device))
    if device.type != "cpu" or not _RESET.exists():
        return None
    peak = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    return None if peak is None else int(peak[1]) * 1024
