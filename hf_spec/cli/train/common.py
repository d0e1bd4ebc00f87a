"""What the commands of `hf-spec train` and `hf-spec calibrate` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from hf_spec.training.responses import Response

Item = TypeVar("Item")

Responses = Annotated[
    Path, typer.Option(exists=True, help="The target's answers, from `hf-spec train responses`.")
]
ResponseFiles = Annotated[
    list[Path],
    typer.Option(exists=True, help="Answers of `hf-spec train responses`; may be repeated."),
]
AdapterOut = Annotated[
    Path, typer.Option(help="Folder for the adapter; an interrupted run resumes.")
]
TeacherFolder = Annotated[
    Path | None, typer.Option(help="Folder for the target's opinions; beside the answers.")
]


class RecordedCommand(TyperCommand):
    """A command whose options stand in the run record of the training that it starts."""

    def invoke(self, ctx: Any) -> Any:
        """Run it."""
        from hf_spec.training.run_record import with_options

        with with_options(ctx.params):
            return super().invoke(ctx)


def known_answers(
    files: Sequence[Path],
    folder: Path | None,
    kind: str,
    compute: Callable[[list[Response], Path], list[Item]],
) -> list[Item]:
    """The answers of all files, with what `compute` says of those of each.

    Args:
        files: of `hf-spec train responses`.
        folder: has a folder for each file; by default they lie beside the files.
        kind: of what is computed; ends the name of a folder beside its file.
        compute: gets the answers of a file and its folder, in one process before the others.
    """
    from hf_spec.training.responses import read_responses
    from hf_spec.training.trainer import processes

    known: list[Item] = []
    for file in files:
        own = file.with_suffix(f".{kind}") if folder is None else folder / file.stem
        with processes().main_process_first():
            known += compute(list(read_responses(file)), own)
    return known


def conclude(figures: Mapping[str, float], next_step: str) -> None:
    """Say how well a training ended and what to do next, once for all its processes."""
    from hf_spec.training.trainer import processes

    if processes().is_main_process:
        said = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        typer.echo(f"on the answers held back: {said}")
        typer.echo(f"next: {next_step}")


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
