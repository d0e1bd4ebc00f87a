"""What the commands of `hf-spec train` and `hf-spec calibrate` share."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand

from hf_spec.cli.options import Placement

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_spec.training.features import Text
    from hf_spec.training.responses import Response

Item = TypeVar("Item")

Responses = Annotated[
    Path,
    typer.Option(
        exists=True, dir_okay=False, help="The target's answers, from `hf-spec train responses`."
    ),
]
ResponseFiles = Annotated[
    list[Path],
    typer.Option(
        exists=True,
        dir_okay=False,
        help="Answers of `hf-spec train responses`; may be repeated.",
    ),
]
AdapterOut = Annotated[
    Path, typer.Option(help="Folder for the adapter; an interrupted run resumes.")
]
TeacherFolder = Annotated[
    Path | None, typer.Option(help="Folder for the target's opinions; beside the answers.")
]
FeaturesFolder = Annotated[
    Path | None, typer.Option(help="Folder for the target's features; beside the answers.")
]
StoreFeatures = Annotated[
    bool, typer.Option(help="Keep the features on disk, or compute them in every step.")
]

InitHead = Annotated[
    str | None, typer.Option(help="A head to go on from: folder or Hub id; sizes must agree.")
]


class RecordedCommand(TyperCommand):
    """A command whose options stand in the run record of the training that it starts."""

    def invoke(self, ctx: Any) -> Any:
        """Run it."""
        from hf_spec.training.run_record import with_options

        with with_options(ctx.params):
            return super().invoke(ctx)


def beside(responses: Path, kind: str) -> Path:
    """The folder for what is computed of a file of answers, where no other is named."""
    return responses.with_suffix(f".{kind}")


def known_answers(
    files: Sequence[Path],
    folder: Path | None,
    kind: str,
    compute: Callable[[list[Response], Path], list[Item]],
) -> list[Item]:
    """The answers of all files, with what `compute` says of those of each.

    It gets the answers of a file and the file's own folder, in one process before the others: in
    `folder`, or else beside the file, with the ending `kind`.
    """
    from hf_spec.training.responses import read_responses
    from hf_spec.training.trainer import processes

    known: list[Item] = []
    for file in files:
        own = beside(file, kind) if folder is None else folder / file.stem
        with processes().main_process_first():
            known += compute(list(read_responses(file)), own)
    return known


def known_texts(
    target: PreTrainedModel,
    files: Sequence[Path],
    layers: Sequence[int],
    folder: Path | None,
    store: bool,
) -> list[Text]:
    """The answers of all files with their features of `layers`, kept as by `known_answers`.

    Unless they are to be stored, they come without, to be computed in every step.
    """
    from hf_spec.training.features import Text, disk_need, features_of, in_words, stored_texts

    def texts(answers: list[Response], own: Path) -> list[Text]:
        if not store:
            return [Text(answer) for answer in answers]
        need = in_words(disk_need(target, answers, layers))
        typer.echo(f"the features of {len(answers)} texts take {need} in {own}")
        return stored_texts(target, answers, own, layers)

    return known_answers(files, folder, features_of(layers), texts)


def conclude(figures: Mapping[str, float], next_step: str) -> None:
    """Say how well a training ended and what to do next, once for all its processes."""
    from hf_spec.training.trainer import processes

    if processes().is_main_process:
        said = ", ".join(f"{name} {value:.3f}" for name, value in figures.items())
        typer.echo(f"on the answers held back: {said}")
        typer.echo(f"next: {next_step}")


def next_command(*words: object, placement: Placement) -> str:
    """A command of `hf-spec` to be copied, quoted for the shell, at the same place."""
    given = ["hf-spec", *map(str, words)]
    if placement.dtype != "auto":
        given += ["--dtype", placement.dtype]
    if placement.device is not None:
        given += ["--device", placement.device]
    return shlex.join(given)


def bench_command(model: object, strategy: str, placement: Placement) -> str:
    """The command that measures what has just been trained or calibrated."""
    return next_command("bench", model, "--strategy", strategy, placement=placement)


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    from rich.console import Console

    from hf_spec.evaluation.bench.tables import Table

    Console().print(Table(columns, list(rows)).drawn(title))
