"""What the commands of `hf-spec train` and `hf-spec calibrate` share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from hf_spec.training.responses import Response

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
Vocabulary = Annotated[
    int, typer.Option(min=0, help="Most frequent tokens it can propose; 0 for all.")
]
Epochs = Annotated[int, typer.Option(min=1, help="Passes over the answers.")]
LearningRate = Annotated[
    float, typer.Option(min=0, help="Highest; rises over the first steps, falls to a tenth.")
]
BatchTokens = Annotated[int, typer.Option(min=1, help="Tokens of a micro-batch, padding included.")]
Accumulate = Annotated[int, typer.Option(min=1, help="Micro-batches of a step.")]
EvaluateEvery = Annotated[
    int, typer.Option(min=1, help="Steps between two looks at the answers held back.")
]
Seed = Annotated[int, typer.Option(help="Of the order and of every random number.")]
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


def conclude(figures: Mapping[str, float], next_step: str) -> None:
    """Say how well a training ended and what to do next, once for all its processes.

    Args:
        figures: on the answers that were held back.
        next_step: see `hf_spec.cli.next_step`.
    """
    from hf_spec.training.trainer import processes

    if processes().is_main_process:
        said = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        typer.echo(f"on the answers held back: {said}")
        typer.echo(f"next: {next_step}")


def answer_files(
    files: list[Path], folder: Path | None, kind: str
) -> Iterator[tuple[list[Response], Path]]:
    """The answers of each file, and the folder for what is computed from them.

    Args:
        files: of `hf-spec train responses`.
        folder: has a folder for each file; by default they lie beside the files.
        kind: of what is computed; ends the name of a folder beside its file.
    """
    from hf_spec.training.responses import read_responses

    for file in files:
        own = file.with_suffix(f".{kind}") if folder is None else folder / file.stem
        yield list(read_responses(file)), own
