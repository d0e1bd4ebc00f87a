"""`hf-spec verify`, a thin command over `hf_spec.evaluation.lossless.verify`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from hf_spec.cli import options
from hf_spec.cli.failures import FAILED, UNPROVEN
from hf_spec.common.tables import Table
from hf_spec.evaluation.settings import VerificationPlan

if TYPE_CHECKING:
    from hf_spec.evaluation.lossless.sampling import SamplingResult
    from hf_spec.evaluation.lossless.verify import Verification

# Prompts of each task of this package.
PER_TASK = 2
# Exit status by verdict; see `hf_spec.cli.failures`.
STATUS = {"passed": 0, "failed": FAILED, "unproven": UNPROVEN}


@options.from_settings
def verify(  # noqa: PLR0913 - one parameter per option
    *,
    model: options.ModelArgument,
    strategy: Annotated[list[str], typer.Option(help=options.STRATEGY_HELP)],
    assistant: options.Assistants = None,
    prompts: options.Prompts = None,
    per_task: Annotated[
        int | None, typer.Option(min=1, help=options.PER_TASK_HELP.format(PER_TASK))
    ] = None,
    plan: VerificationPlan,
    out: options.Out = None,
    placement: options.Placement,
) -> None:
    """Verify that a strategy does not change the output.

    Greedy outputs of your model and prompts are compared with plain generate() in the same dtype;
    each difference is classified as a tie of two logits or a mistake. Samples are compared with the
    model's own distribution. Exit status: 0 if there are only ties and drafts were accepted, 1 for
    a mistake, 3 if no draft was accepted, so that nothing is proven.

        hf-spec verify MODEL --strategy lookup --strategy tree@DRAFT
    """
    from tqdm import tqdm

    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.common.files import write_json
    from hf_spec.common.machine import environment
    from hf_spec.common.prompts import load_prompts
    from hf_spec.evaluation.lossless import verify as checks
    from hf_spec.methods.entries import parse_entries

    options.check_out(out, prompts)
    entries = parse_entries(strategy, assistant or [], compile_layers=None)
    texts = load_prompts(prompts, options.prompts_per_task(per_task, prompts, PER_TASK))
    target, tokenizer = load_target(model, placement), load_tokenizer(model)
    runs = len(entries) * (len(texts) + bool(plan.sampled_prompts))
    with tqdm(total=runs, desc="checks", disable=None) as bar:
        verifications = checks.verify(target, tokenizer, texts, entries, plan, bar.update)
    console = Console()
    for verification in verifications:
        _show(console, verification, tokenizer)
    verdict = min((v.verdict for v in verifications), key=checks.VERDICTS.index)
    if out is not None:
        facts: dict[str, Any] = {
            "command": f"hf-spec {' '.join(sys.argv[1:])}",
            "model": model,
            "dtype": str(target.dtype).removeprefix("torch."),
            "environment": environment(target.device),
            "new_tokens": plan.new_tokens,
            "passed": verdict == checks.PASSED,
            "verdict": verdict,
        }
        write_json(out, {**facts, "strategies": [v.to_dict() for v in verifications]})
    raise typer.Exit(STATUS[verdict])


def _show(console: Console, verification: Verification, tokenizer: Any) -> None:
    """Print the result for one strategy."""
    from hf_spec.evaluation.lossless.mismatch import TIE

    outputs = verification.greedy
    differing = [output for output in outputs if output.differences]
    ties = sum(diff.kind == TIE for output in outputs for diff in output.differences)
    mistakes = sum(len(output.mistakes) for output in outputs)
    tau = sum(output.tau for output in outputs) / max(len(outputs), 1)
    console.rule(f"[bold]{escape(verification.name)}", align="left")
    console.print(
        f"greedy: {len(outputs) - len(differing)} of {len(outputs)} outputs identical, "
        f"{sum(output.new_tokens for output in outputs)} tokens, mean tau {tau:.2f}; "
        f"{ties} ties, {mistakes} mistakes"
    )
    if differing:
        title = "differences from plain generate()"
        console.print(_differences(verification, tokenizer).drawn(title))
    if verification.sampling is not None:
        _show_sampling(console, verification.sampling)
    unproven = " and ".join(verification.unproven)
    messages = {
        "passed": "[bold green]passed",
        "failed": "[bold red]FAILED",
        "unproven": f"[bold yellow]NOT PROVEN[/]: no draft was accepted ({unproven}), so nothing "
        "was tested; try other prompts, more --max-new-tokens, more --draws, or a fixed draft "
        "length as in --strategy lookup:max_draft_tokens=5",
    }
    console.print(messages[verification.verdict])


def _differences(verification: Verification, tokenizer: Any) -> Table:
    from hf_spec.evaluation.lossless.mismatch import TIE

    def text(token: int | None) -> str:
        return "the end" if token is None else repr(tokenizer.decode([token]))

    rows = [
        (
            output.prompt,
            str(diff.position),
            *map(text, (diff.plain_token, diff.token)),
            f"{diff.margin:.2g}",
            f"{diff.error:.2g}",
            Text.assemble(
                (diff.kind, "green" if diff.kind == TIE else "bold red"), f": {diff.reason}"
            ),
        )
        for output in verification.greedy
        for diff in output.differences
    ]
    head = ("prompt", "position", "plain", "output", "margin", "error", "reason")
    return Table(head, rows, wrapped=(6, 0, 2, 3))


def _show_sampling(console: Console, result: SamplingResult) -> None:
    drafted = sum(text.drafted for text in result.texts)
    accepted = sum(text.accepted for text in result.texts)
    impossible = sum(text.comparison.impossible for text in result.texts)
    console.print(
        f"sampling: {result.draws} draws after {len(result.texts)} texts, {result.freedom} "
        f"degrees of freedom, p = {result.p_value:.3g} (fails below {result.significance:g}); "
        f"{accepted} of {drafted} draft tokens accepted"
    )
    console.print(
        f"a bias that shifts {result.detectable:.1%} of the probability in every text is detected "
        "with 99 % probability; smaller ones may be missed"
    )
    if impossible:
        console.print(f"[bold red]{impossible} draws are impossible in plain sampling")
    if accepted == drafted > 0:
        console.print("[yellow]no draft was rejected, so the acceptance rule was hardly tested")
