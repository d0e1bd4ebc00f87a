"""Options and output that the commands of `hf-spec train` and `hf-spec calibrate` share."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console

from hf_spec.cli.command import GENERAL, Command
from hf_spec.cli.options import FILE, Placement
from hf_spec.common.tables import Table
from hf_spec.training.settings import DATA

if TYPE_CHECKING:
    from hf_spec.training.job import TrainingResult

Responses = Annotated[Path, typer.Option(**FILE, help="Answers of hf-spec train responses.")]
ResponseFiles = Annotated[
    list[Path], typer.Option(**FILE, help="Answers of train responses; may be repeated.")
]


class DataCommand(Command):
    """Command whose options, except settings, name the model and the data."""

    panels: ClassVar = dict.fromkeys(("config", "help"), GENERAL)
    other_panels: ClassVar = dict.fromkeys(("argument", "option"), DATA)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; its options go to the run record of the training that it starts."""
        from hf_spec.training.trainer import with_options

        with with_options(ctx.params):
            return super().invoke(ctx)


def conclude(result: TrainingResult, next_step: str) -> None:
    """Print the held-out metrics and the next command, in the main process."""
    from hf_spec.training.trainer import processes

    if not processes().is_main_process:
        return
    if result.table is None:
        figures = ", ".join(f"{name} {value:.3f}" for name, value in result.figures.items())
        typer.echo(f"on the held-out answers: {figures}")
    else:
        show_table(*result.table)
    typer.echo(f"next: {next_step}")


def next_command(*words: object, placement: Placement) -> str:
    """Return a command of `hf-spec`, quoted for the shell, with the same dtype and device."""
    command = ["hf-spec", *map(str, words)]
    if placement.dtype != "auto":
        command += ["--dtype", placement.dtype]
    if placement.device is not None:
        command += ["--device", placement.device]
    return shlex.join(command)


def bench_command(model: object, strategy: str, placement: Placement) -> str:
    """Return the command that benchmarks a trained or calibrated strategy."""
    return next_command("bench", model, "--strategy", strategy, placement=placement)


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    Console().print(Table(columns, list(rows)).drawn(title))
