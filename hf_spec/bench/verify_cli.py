"""`hf-spec verify`: a thin command over `hf_spec.bench.verify`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm
from transformers import AutoTokenizer

from hf_spec.bench.contenders import ENTRY, parse_entry, with_assistants
from hf_spec.bench.mismatch import TIE
from hf_spec.bench.prompts import load_prompts
from hf_spec.bench.runner import environment
from hf_spec.bench.sampling import SamplingPlan, SamplingResult
from hf_spec.bench.verify import Subject, Verification, VerificationPlan
from hf_spec.bench.verify import verify as run_verification
from hf_spec.files import written_whole
from hf_spec.training.cli_common import Dtype, load_target


def verify(  # noqa: PLR0913 - one parameter an option
    model: Annotated[str, typer.Argument(help="The target model: folder or Hub id.")],
    strategy: Annotated[list[str], typer.Option(help=f"{ENTRY}, without spaces; may be repeated.")],
    assistant: Annotated[
        list[str] | None,
        typer.Option(help="For strategies that name none; repeated, a list (for auto)."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(exists=True, help="JSON lines with `turns`; the package's own by default."),
    ] = None,
    per_task: Annotated[int, typer.Option(min=1, help="Prompts of each task.")] = 2,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each greedy output.")] = 64,
    sampled_prompts: Annotated[
        int, typer.Option(min=0, help="Prompts sampled from, the shortest ones; 0 for none.")
    ] = 4,
    draws: Annotated[int, typer.Option(min=20, help="Short samples behind each of them.")] = 500,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the samples.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    dtype: Dtype = "float32",
    out: Annotated[Path | None, typer.Option(help="JSON file.")] = None,
) -> None:
    """Prove on your own model and prompts that a strategy leaves the output as it is.

    Greedy outputs are compared with plain generate(), in the dtype in use; each difference is
    traced to its first token and found to be a tie of two logits or a mistake. Samples are compared
    with the model's own distribution. Ends with status 0 only if nothing but ties was found.

        hf-spec verify MODEL --strategy lookup --strategy tree@DRAFT --out report.json
    """
    entries = with_assistants([parse_entry(text) for text in strategy], assistant or [])
    subjects = [Subject(*entry) for entry in entries]
    texts = load_prompts(prompts, per_task)
    target, tokenizer = load_target(model, dtype), AutoTokenizer.from_pretrained(model)
    sampling = SamplingPlan(draws=draws, temperature=temperature, seed=seed)
    plan = VerificationPlan(new_tokens, sampled_prompts, sampling)
    runs = len(subjects) * (len(texts) + bool(sampled_prompts))
    with tqdm(total=runs, desc="checks", disable=None) as bar:
        found = run_verification(target, tokenizer, texts, subjects, plan, bar.update)
    console = Console()
    for verification in found:
        _show(console, verification, tokenizer)
    passed = all(verification.passed for verification in found)
    if out is not None:
        facts: dict[str, Any] = {
            "command": f"hf-spec {' '.join(sys.argv[1:])}",
            "model": model,
            "dtype": dtype,
            "environment": environment(),
            "new_tokens": new_tokens,
            "passed": passed,
        }
        report = {**facts, "strategies": [one.to_dict() for one in found]}
        with written_whole(out) as part:
            part.write_text(json.dumps(report, indent=1), encoding="utf-8")
    raise typer.Exit(0 if passed else 1)


def _show(console: Console, verification: Verification, tokenizer: Any) -> None:
    """One strategy: what was compared, every difference, the distribution, the verdict."""
    outputs = verification.greedy
    differing = [output for output in outputs if output.differences]
    ties = sum(found.kind == TIE for output in outputs for found in output.differences)
    mistakes = sum(len(output.mistakes) for output in outputs)
    tau = sum(output.tau for output in outputs) / max(len(outputs), 1)
    console.rule(f"[bold]{escape(verification.name)}", align="left")
    console.print(
        f"greedy: {len(outputs) - len(differing)} of {len(outputs)} outputs identical, "
        f"{sum(output.new_tokens for output in outputs)} tokens, mean tau {tau:.2f}; "
        f"{ties} ties, {mistakes} mistakes"
    )
    if differing:
        console.print(_differences(verification, tokenizer))
    if not any(output.tau for output in outputs):
        console.print("[yellow]no draft was accepted: this says little about the strategy")
    if verification.sampling is not None:
        _show_sampling(console, verification.sampling)
    console.print("[bold green]passed" if verification.passed else "[bold red]FAILED")


def _differences(verification: Verification, tokenizer: Any) -> Table:
    table = Table(title="differences from plain generate()")
    for column in ("prompt", "token", "plain", "came", "margin", "error", "found"):
        table.add_column(column)
    for output in verification.greedy:
        for found in output.differences:
            texts = [
                "the end" if token is None else escape(repr(tokenizer.decode([token])))
                for token in (found.plain_token, found.token)
            ]
            color = "green" if found.kind == TIE else "bold red"
            table.add_row(
                escape(output.prompt),
                str(found.position),
                *texts,
                f"{found.margin:.2g}",
                f"{found.error:.2g}",
                f"[{color}]{found.kind}[/]: {found.reason}",
            )
    return table


def _show_sampling(console: Console, result: SamplingResult) -> None:
    drafted = sum(text.drafted for text in result.texts)
    accepted = sum(text.accepted for text in result.texts)
    impossible = sum(text.comparison.impossible for text in result.texts)
    console.print(
        f"sampling: {result.draws} draws behind {len(result.texts)} texts, {result.freedom} "
        f"degrees of freedom, p = {result.p_value:.3g} (fails below {result.significance:g}); "
        f"{accepted} of {drafted} draft tokens accepted"
    )
    console.print(
        f"a bias that moves {result.detectable:.1%} of the probability in every text is found "
        "with 99 %; smaller ones may be missed"
    )
    if impossible:
        console.print(f"[bold red]{impossible} draws are impossible in plain sampling")
    if not 0 < accepted < drafted:
        console.print(
            "[yellow]no draft was accepted, or none rejected: this says little about the rule"
        )
