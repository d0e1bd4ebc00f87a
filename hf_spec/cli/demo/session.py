"""One demo: the model, its benchmark, and what is shown of it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_spec.bench.runner import Record
from hf_spec.bench.suite import Benchmark
from hf_spec.cli.demo.replay import Lane, Recorder, replay
from hf_spec.cli.demo.results import (
    Answer,
    CpuWatch,
    copied_share,
    prompts_table,
    slowest_to_fastest,
    strategies_table,
    warnings,
)
from hf_spec.cli.loading import load_target, load_tokenizer
from hf_spec.cli.options import Placement
from hf_spec.data.machine import environment
from hf_spec.data.small_models import bars_on_a_terminal_only, smollm2_135m_instruct
from hf_spec.training.responses import end_tokens

LEGEND = (
    "total time: of all prompts together. ratio to none: none drafts nothing and shows what the "
    "engine alone brings (packed weights); this column is what drafts add. tau: accepted draft "
    "tokens per forward of the model. copied: share of the answer's tokens that stand in the "
    "prompt, in runs of three or more. identical: to plain generate(), in every run."
)


def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Fetch the model, if it is on no disk here, and load it in float32."""
    folder = smollm2_135m_instruct()
    with bars_on_a_terminal_only():
        return load_target(str(folder), Placement("float32")), load_tokenizer(str(folder))


def run(benchmark: Benchmark, recorder: Recorder, console: Console) -> bool:
    """Time, show and compare everything; whether every output is that of plain `generate()`.

    The last strategy is shown beside plain `generate()`; without a terminal as plain lines.
    `recorder` is the benchmark's streamer.
    """
    console.print(Text(_conditions(benchmark.model), "dim"))
    records: list[Record] = []
    answers: dict[str, Answer] = {}
    watch = CpuWatch()
    # Drawn after runs only: an animated bar would take processor time from what is timed.
    drawing = {"leave": False, "mininterval": 0, "delay": 1e-3, "disable": not console.is_terminal}
    bar = tqdm(total=benchmark.num_runs, desc="timing, in turn", file=console.file, **drawing)
    measured = benchmark.run(bar.update)
    for prompt in benchmark.prompts:
        console.rule(prompt.id, align="left")
        console.print(Text(prompt.turns[0], "dim"))
        records = next(measured).records
        bar.clear()
        count = len(benchmark.contenders)
        # One recording a run, so those of the last repetition come last in both.
        runs = zip(records[-count:], recorder.recordings[-count:], strict=True)
        latest = {record.contender: (record, recording) for record, recording in runs}
        shown = [latest[benchmark.contenders[place].name] for place in (0, -1)]
        _show(console, [recording.lane(r, benchmark.tokenizer) for r, recording in shown])
        plain = shown[0][1]
        copied = copied_share(plain.prompt_ids, plain.token_ids)
        ended = plain.token_ids[-1] in end_tokens(benchmark.model)
        answers[prompt.id] = Answer(len(plain.token_ids), copied, ended)
    bar.close()
    for warning in warnings(watch.share_of_others(), slowest_to_fastest(records, "plain")):
        console.print(Text(f"warning: {warning}", "yellow"))
    console.print(strategies_table(records).drawn("all prompts"))
    console.print(prompts_table(records, answers).drawn("ratio to plain by prompt"))
    console.print(Text(LEGEND, "dim"))
    return all(record.identical for record in records)


def _show(console: Console, lanes: Sequence[Lane]) -> None:
    """Side by side if there is a terminal for it."""
    if console.is_terminal:
        console.print(Text("the last timed runs, replayed at their own speed", "dim"))
        replay(console, lanes)
        return
    console.print(lanes[0].text(lanes[0].seconds), soft_wrap=True)
    times = "; ".join(f"{lane.title} {lane.clock(lane.seconds)}" for lane in lanes)
    console.print(f"[{times}]", markup=False, soft_wrap=True)


def _conditions(model: PreTrainedModel) -> str:
    facts = environment(model.device)
    threads = f", {facts['threads']} threads" if model.device.type == "cpu" else ""
    return (
        f"SmolLM2-135M-Instruct, float32, greedy, on {facts['device']}{threads}; "
        f"torch {facts['torch']}, transformers {facts['transformers']}"
    )
