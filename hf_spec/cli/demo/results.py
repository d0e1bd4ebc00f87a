"""What came out of the demo: tables that fit into 80 columns, and whether they can be trusted.

Timings are worthless if the machine was busy with something else.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import psutil

from hf_spec.bench.report import SPEEDS
from hf_spec.bench.runner import Record
from hf_spec.bench.summary import ALL, summary
from hf_spec.bench.tables import Table

# Chosen so that a machine which stays below both gives ratios worth reading.
BUSY_SHARE = 0.10
UNSTEADY_RATIO = 1.20
# Shorter runs of tokens are shared by any two texts on the same subject.
COPIED_NGRAM_LEN = 3
# More does not fit.
LEFT_OUT = ("tokens/s", "peak memory")


@dataclass(frozen=True)
class Answer:
    """What plain `generate()` answered: tokens, share copied from the prompt, ended by itself."""

    num_tokens: int
    copied: float
    ended: bool


def copied_share(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:
    """The share of output tokens, 0 to 1, in runs of three or more that the prompt has too."""
    length = COPIED_NGRAM_LEN
    in_prompt = set(zip(*(prompt_ids[start:] for start in range(length)), strict=False))
    copied: set[int] = set()
    for start in range(len(output_ids) - length + 1):
        if tuple(output_ids[start : start + length]) in in_prompt:
            copied.update(range(start, start + length))
    return len(copied) / max(len(output_ids), 1)


def strategies_table(records: Sequence[Record]) -> Table:
    """One row for plain generate() and for each strategy, all prompts together."""
    columns = {head: cell for head, cell in SPEEDS.items() if not head.startswith(LEFT_OUT)}
    return Table.of(columns, [row for row in summary(records) if row["task"] == ALL])


def prompts_table(records: Sequence[Record], answers: Mapping[str, Answer]) -> Table:
    """One row per prompt, with its answer and the ratio of each strategy to plain generate()."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for record in records:
        ratios[record.prompt, record.contender].append(record.ratio)
    strategies = list(dict.fromkeys(contender for _, contender in ratios))[1:]
    rows = []
    for prompt, answer in answers.items():
        tokens = f"{answer.num_tokens}{'' if answer.ended else ', cut'}"
        cells = (f"{median(ratios[prompt, name]):.2f}" for name in strategies)
        rows.append([prompt, tokens, f"{answer.copied:.0%}", *cells])
    return Table(["", "tokens", "copied", *strategies], rows)


class CpuWatch:
    """How much of the processors other programs take from now on."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self.share_of_others()

    def share_of_others(self) -> float:
        """Their share of the time of all processors since it was asked last, 0 to 1."""
        own = self._own.cpu_percent() / psutil.cpu_count()
        return min(1.0, max(0.0, (psutil.cpu_percent() - own) / 100))


def slowest_to_fastest(records: Sequence[Record], contender: str) -> float:
    """Longest over shortest time of one contender for the same prompt, at worst."""
    seconds = defaultdict(list)
    for record in records:
        if record.contender == contender:
            seconds[record.prompt].append(record.seconds)
    return max((max(times) / min(times) for times in seconds.values()), default=1.0)


def warnings(share_of_others: float, disagreement: float) -> list[str]:
    """What a reader must know before believing a timing; nothing on an idle machine."""
    found = []
    if share_of_others > BUSY_SHARE:
        found.append(
            f"Other programs took {share_of_others:.0%} of the processors during the timing; "
            "the ratios are not to be trusted. Run the demo again on an idle machine."
        )
    if disagreement > UNSTEADY_RATIO:
        found.append(
            f"Two runs of plain generate() on the same prompt differ by a factor of "
            f"{disagreement:.2f}; the machine's speed is not steady. Try --repeats 5."
        )
    return found
