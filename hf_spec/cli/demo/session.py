"""Run of the demo: load the model, benchmark it, show texts and a table of 80 columns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_spec.cli.demo.replay import Lane, Recorder, card, replay
from hf_spec.cli.demo.watch import CpuWatch
from hf_spec.cli.loading import load_target, load_tokenizer
from hf_spec.cli.options import Placement
from hf_spec.common.machine import environment
from hf_spec.common.small_models import bars_on_a_terminal_only, smollm2_135m_instruct
from hf_spec.common.tables import Table
from hf_spec.evaluation.bench.report import SPEEDS
from hf_spec.evaluation.bench.runner import Record
from hf_spec.evaluation.bench.suite import Benchmark
from hf_spec.evaluation.bench.summary import ALL, IDLE, summary
from hf_spec.training.responses import end_tokens

LEGEND = (
    "total time: of all prompts. ratio to none: the speedup by drafting; none is the same engine "
    "without it. tau: accepted draft tokens per forward pass of the model. identical: equal to "
    "plain generate() in every run."
)

# Above it, the ratios are unreliable.
UNSTEADY_RATIO = 1.20
# Any two texts on a subject share shorter token sequences.
COPIED_NGRAM_LEN = 3
# Columns that do not fit.
LEFT_OUT = ("tokens/s", "peak memory")


def load(name: str | None, placement: Placement) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model `name`, by default the small one in float32, downloaded if needed."""
    if name is None:
        name = str(smollm2_135m_instruct())
        if placement.dtype == "auto":
            placement = replace(placement, dtype="float32")
    with bars_on_a_terminal_only():
        return load_target(name, placement), load_tokenizer(name)


def run(benchmark: Benchmark, recorder: Recorder, console: Console, name: str) -> bool:
    """Run and show the benchmark; return True if every output equals plain `generate()`.

    The last strategy is replayed beside plain `generate()`, or printed without a terminal.
    `recorder` is the benchmark's streamer.
    """
    device = benchmark.model.device
    facts = environment(device)
    threads = f", {facts['threads']} threads" if device.type == "cpu" else ""
    conditions = (
        f"{name}, {str(benchmark.model.dtype).removeprefix('torch.')}, greedy, "
        f"on {facts['device']}{threads}; "
        f"torch {facts['torch']}, transformers {facts['transformers']}"
    )
    console.print(Text(conditions, "dim"))
    records: list[Record] = []
    others = CpuWatch()
    # Updated only between runs: an animated bar would slow down the timed work.
    bar_options = {"leave": False, "mininterval": 0, "delay": 1e-3, "file": console.file}
    bar_options["disable"] = not console.is_terminal
    bar = tqdm(total=benchmark.num_runs, desc="timing, in turn", **bar_options)
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
        (plain, recording), (ours, _) = shown
        copied = copied_share(recording.prompt_ids, recording.token_ids)
        is_cut = recording.token_ids[-1] not in end_tokens(benchmark.model)
        tokens = f"{plain.new_tokens} tokens{' (cut)' * is_cut}, {copied:.0%} copied"
        forwards, speeds, verdict = card(plain, ours)
        line = f"{forwards} forward passes, {verdict}; {speeds} tokens/s; {tokens}"
        console.print(Text(line, "bold"))
    bar.close()
    for warning in filter(None, (others.warning(), unsteady_warning(records))):
        console.print(Text(warning, "yellow"))
    console.print(Text(LEGEND, "dim"))
    console.print(strategies_table(records).drawn("all prompts"))
    console.print(conclusion(records), markup=False)
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


def conclusion(records: Sequence[Record]) -> str:
    """Return a sentence on what drafting added over the engine without drafting."""
    rows = [row for row in summary(records) if row["task"] == ALL and "tau" in row]
    drafting = [row for row in rows if row["contender"] != IDLE]
    if not drafting:
        return "Add --strategy to see what drafting adds over none, the engine without drafting."
    best = max(drafting, key=lambda row: row["ratio_to_none"])
    speed = f"{best['ratio_to_none']:.2f}x the speed of none, the engine without drafting"
    if best["ratio_to_none"] <= 1:
        return f"Drafting added nothing here: {best['contender']}, the fastest, has {speed}."
    return f"Drafting with {best['contender']} added {best['ratio_to_none'] - 1:.0%}: {speed}."


def unsteady_warning(records: Sequence[Record]) -> str:
    """Return a warning if runs of plain `generate()` on a prompt differ much, otherwise ""."""
    seconds = defaultdict(list)
    for record in records:
        if record.contender == "plain":
            seconds[record.prompt].append(record.seconds)
    factor = max(max(times) / min(times) for times in seconds.values())
    if factor <= UNSTEADY_RATIO:
        return ""
    return (
        "warning: two runs of plain generate() on the same prompt differ by a factor of "
        f"{factor:.2f}; the machine's speed varies, so try --repeats 5"
    )
