"""Run of the demo: load the model, benchmark it, show texts and tables of 80 columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import psutil
from rich.console import Console
from rich.text import Text
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_spec.cli.demo.replay import Lane, Recorder, replay
from hf_spec.cli.loading import load_target, load_tokenizer
from hf_spec.cli.options import Placement
from hf_spec.common.machine import environment
from hf_spec.common.small_models import bars_on_a_terminal_only, smollm2_135m_instruct
from hf_spec.evaluation.bench.report import SPEEDS
from hf_spec.evaluation.bench.runner import Record
from hf_spec.evaluation.bench.suite import Benchmark
from hf_spec.evaluation.bench.summary import ALL, summary
from hf_spec.evaluation.bench.tables import Table
from hf_spec.training.responses import end_tokens

LEGEND = (
    "total time: of all prompts. ratio to none: none is the engine without drafting (packed "
    "weights), so this column is the speedup by drafts. tau: accepted draft tokens per forward "
    "pass of the model. copied: share of the answer's tokens in sequences of three or more that "
    "also occur in the prompt. identical: equal to plain generate() in every run."
)

# Below both limits the ratios are reliable.
BUSY_SHARE = 0.10
UNSTEADY_RATIO = 1.20
# Any two texts on a subject share shorter token sequences.
COPIED_NGRAM_LEN = 3
# Columns that do not fit.
LEFT_OUT = ("tokens/s", "peak memory")


@dataclass(frozen=True)
class Answer:
    """Answer of plain `generate()`; `copied` is the share of tokens from the prompt."""

    num_tokens: int
    copied: float
    ended: bool


def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Download the model if needed and load it in float32."""
    folder = smollm2_135m_instruct()
    with bars_on_a_terminal_only():
        return load_target(str(folder), Placement("float32")), load_tokenizer(str(folder))


def run(benchmark: Benchmark, recorder: Recorder, console: Console) -> bool:
    """Run and show the benchmark; return True if every output equals plain `generate()`.

    The last strategy is replayed beside plain `generate()`, or printed without a terminal.
    `recorder` is the benchmark's streamer.
    """
    device = benchmark.model.device
    facts = environment(device)
    threads = f", {facts['threads']} threads" if device.type == "cpu" else ""
    conditions = (
        f"SmolLM2-135M-Instruct, float32, greedy, on {facts['device']}{threads}; "
        f"torch {facts['torch']}, transformers {facts['transformers']}"
    )
    console.print(Text(conditions, "dim"))
    records: list[Record] = []
    answers: dict[str, Answer] = {}
    others = CpuWatch()
    # Updated only between runs: an animated bar would slow down the timed work.
    bar_options = {
        "leave": False,
        "mininterval": 0,
        "delay": 1e-3,
        "disable": not console.is_terminal,
    }
    bar = tqdm(total=benchmark.num_runs, desc="timing, in turn", file=console.file, **bar_options)
    measured = benchmark.run(bar.update)
    for prompt in benchmark.prompts:
        console.rule(prompt.id, align="left")
        console.print(Text(prompt.turns[0], "dim"))
        records = next(measured).records
        bar.clear()
        count = len(benchmark.contenders)
        # There is one recording per run, so both end with those of the last repetition.
        runs = zip(records[-count:], recorder.recordings[-count:], strict=True)
        latest = {record.contender: (record, recording) for record, recording in runs}
        shown = [latest[benchmark.contenders[index].name] for index in (0, -1)]
        _show(console, [recording.lane(r, benchmark.tokenizer) for r, recording in shown])
        plain = shown[0][1]
        copied = copied_share(plain.prompt_ids, plain.token_ids)
        ended = plain.token_ids[-1] in end_tokens(benchmark.model)
        answers[prompt.id] = Answer(len(plain.token_ids), copied, ended)
    bar.close()
    for warning in warnings(others.share_of_others(), slowest_to_fastest(records, "plain")):
        console.print(Text(f"warning: {warning}", "yellow"))
    console.print(strategies_table(records).drawn("all prompts"))
    console.print(prompts_table(records, answers).drawn("ratio to plain by prompt"))
    console.print(Text(LEGEND, "dim"))
    return all(record.identical for record in records)


def _show(console: Console, lanes: Sequence[Lane]) -> None:
    """Replay the lanes in a terminal, otherwise print the first and all times."""
    if console.is_terminal:
        console.print(Text("the last timed runs, replayed at original speed", "dim"))
        replay(console, lanes)
        return
    console.print(lanes[0].text(lanes[0].seconds), soft_wrap=True)
    times = "; ".join(f"{lane.title} {lane.clock(lane.seconds)}" for lane in lanes)
    console.print(f"[{times}]", markup=False, soft_wrap=True)


def copied_share(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:
    """Return the share of output tokens in n-grams of `COPIED_NGRAM_LEN` of the prompt."""
    length = COPIED_NGRAM_LEN
    in_prompt = set(zip(*(prompt_ids[start:] for start in range(length)), strict=False))
    copied: set[int] = set()
    for start in range(len(output_ids) - length + 1):
        if tuple(output_ids[start : start + length]) in in_prompt:
            copied.update(range(start, start + length))
    return len(copied) / max(len(output_ids), 1)


def strategies_table(records: Sequence[Record]) -> Table:
    """Return a row per contender over all prompts."""
    columns = {head: cell for head, cell in SPEEDS.items() if not head.startswith(LEFT_OUT)}
    return Table.of(columns, [row for row in summary(records) if row["task"] == ALL])


def prompts_table(records: Sequence[Record], answers: Mapping[str, Answer]) -> Table:
    """Return a row per prompt with its answer and the speedup of each strategy."""
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
    """CPU use of other programs."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self.share_of_others()

    def share_of_others(self) -> float:
        """Return their share of all processors since the last call, 0 to 1."""
        own = self._own.cpu_percent() / psutil.cpu_count()
        return min(1.0, max(0.0, (psutil.cpu_percent() - own) / 100))


def slowest_to_fastest(records: Sequence[Record], contender: str) -> float:
    """Return the largest ratio over prompts of longest to shortest time of a contender."""
    seconds = defaultdict(list)
    for record in records:
        if record.contender == contender:
            seconds[record.prompt].append(record.seconds)
    return max((max(times) / min(times) for times in seconds.values()), default=1.0)


def warnings(share_of_others: float, disagreement: float) -> list[str]:
    """Return warnings about unreliable timings."""
    messages = []
    if share_of_others > BUSY_SHARE:
        messages.append(
            f"Other programs used {share_of_others:.0%} of the processors during the timing; the "
            "ratios are unreliable. Run the demo again on an idle machine."
        )
    if disagreement > UNSTEADY_RATIO:
        messages.append(
            f"Two runs of plain generate() on the same prompt differ by a factor of "
            f"{disagreement:.2f}; the machine's speed varies. Try --repeats 5."
        )
    return messages
