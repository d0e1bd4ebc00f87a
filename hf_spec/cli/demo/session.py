"""One demo: the model, the timing, what is shown of it and how it ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_spec.bench.contenders import Contender
from hf_spec.bench.lineup import Entry, Suite, make_contenders
from hf_spec.bench.runner import Plan, Record, time_contenders
from hf_spec.cli.demo.machine import CpuWatch, slowest_to_fastest, warnings
from hf_spec.cli.demo.prompts import copied_share
from hf_spec.cli.demo.recording import Recorder, Recording
from hf_spec.cli.demo.replay import Lane, replay
from hf_spec.cli.demo.results import Answer, all_identical, prompts_table, strategies_table
from hf_spec.cli.loading import load_target, load_tokenizer
from hf_spec.data.machine import environment
from hf_spec.data.prompts import Prompt
from hf_spec.data.small_models import bars_on_a_terminal_only, smollm2_135m_instruct

LEGEND = (
    "total time: of all prompts together. ratio to none: none drafts nothing and shows what the "
    "engine alone brings (packed weights); this column is what drafts add. tau: accepted draft "
    "tokens per forward of the model. copied: share of the answer's tokens that stand in the "
    "prompt, in runs of three or more. identical: to plain generate(), in every run."
)


@dataclass(frozen=True)
class Subject:
    """What is measured.

    Attributes:
        model: The target.
        tokenizer: Its own.
        entries: Strategies; the last one is shown beside plain `generate()`.
        prompts: What is asked.
        max_new_tokens: Longest answer, in tokens.
        repeats: Timed runs of each strategy and prompt.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    entries: Sequence[Entry]
    prompts: Sequence[Prompt]
    max_new_tokens: int
    repeats: int


def load() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Fetch the model, if it is on no disk here, and load it in float32."""
    folder = smollm2_135m_instruct()
    with bars_on_a_terminal_only():
        return load_target(str(folder), "float32"), load_tokenizer(str(folder))


def run(subject: Subject, console: Console) -> bool:
    """Time, show and compare everything.

    Args:
        subject: What is measured.
        console: Where it is shown; without a terminal as plain lines.

    Returns:
        Whether every output is that of plain `generate()`.
    """
    recorder = Recorder()
    settings = {"do_sample": False, "streamer": recorder}
    found = make_contenders(subject.model, subject.entries, Suite(baselines=False), settings)
    contenders = [recorder.watch(contender) for contender in found]
    console.print(Text(_conditions(subject), "dim"))
    records: list[Record] = []
    answers: dict[str, Answer] = {}
    watch = CpuWatch()
    for prompt, newest in _measured(subject, contenders, console):
        records += newest
        shown = [(c.name, recorder.latest[c.name]) for c in (contenders[0], contenders[-1])]
        answers[prompt.id] = _answer(subject, shown[0][1])
        _show(subject, console, shown)
    for warning in warnings(watch.share_of_others(), slowest_to_fastest(records, "plain")):
        console.print(Text(f"warning: {warning}", "yellow"))
    console.print(strategies_table(records), prompts_table(records, answers))
    console.print(Text(LEGEND, "dim"))
    return all_identical(records)


def _measured(
    subject: Subject, contenders: Sequence[Contender], console: Console
) -> Iterator[tuple[Prompt, list[Record]]]:
    """Announce and time prompt by prompt."""
    # Drawn between runs only: an animated bar would take processor time from what is timed.
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    )
    total = len(subject.prompts) * len(contenders) * subject.repeats
    task = progress.add_task("timing, in turn", total=total)

    def advance() -> None:
        progress.advance(task)
        progress.refresh()

    plan = Plan(subject.max_new_tokens, subject.repeats, device=subject.model.device)
    measured = time_contenders(contenders, subject.prompts, subject.tokenizer, plan, advance)
    for prompt in subject.prompts:
        console.rule(prompt.id, align="left")
        console.print(Text(prompt.turns[0], "dim"))
        with progress:
            records = next(measured)
        yield prompt, records


def _answer(subject: Subject, plain: Recording) -> Answer:
    ends = subject.model.generation_config.eos_token_id
    ended = plain.token_ids[-1] in (ends if isinstance(ends, list) else [ends])
    return Answer(len(plain.token_ids), copied_share(plain.prompt_ids, plain.token_ids), ended)


def _show(subject: Subject, console: Console, shown: Sequence[tuple[str, Recording]]) -> None:
    """Show the last timed runs of two contenders, side by side if there is a terminal for it."""
    lanes = [
        Lane(name, recording.pieces(subject.tokenizer), len(recording.token_ids), recording.seconds)
        for name, recording in shown
    ]
    if console.is_terminal:
        console.print(Text("the last timed runs, replayed at their own speed", "dim"))
        replay(console, lanes)
        return
    console.print(lanes[0].text(lanes[0].seconds), soft_wrap=True)
    times = "; ".join(f"{lane.title} {lane.clock(lane.seconds)}" for lane in lanes)
    console.print(f"[{times}]", markup=False, soft_wrap=True)


def _conditions(subject: Subject) -> str:
    facts = environment(subject.model.device)
    threads = f", {facts['threads']} threads" if subject.model.device.type == "cpu" else ""
    return (
        f"SmolLM2-135M-Instruct, float32, greedy, on {facts['device']}{threads}; "
        f"torch {facts['torch']}, transformers {facts['transformers']}"
    )
