"""Arguments and options that several commands have, with one default each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hf_spec.errors import OptionError

# How a command line names a strategy; `hf_spec.bench.contenders.parse_entry` reads it.
ENTRY = "NAME[:OPTION=JSON,...][@ASSISTANT]"

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]

# The default of every command that loads a target, see `hf_spec.cli.loading`.
AUTO: DtypeName = "auto"


def _named_model(name: str) -> str:
    # The Hub's own rules for names, whose import takes a moment, are needed only now.
    from hf_spec.data.hub import check_name

    check_name(name)
    return name


_MODEL_HELP = "The target model: folder or Hub id."
ModelArgument = Annotated[str, typer.Argument(help=_MODEL_HELP, callback=_named_model)]
ModelOption = Annotated[str, typer.Option(help=_MODEL_HELP, callback=_named_model)]
Dtype = Annotated[
    DtypeName,
    typer.Option(help="Of the target; auto: as it is stored, on a CPU float32."),
]
Device = Annotated[
    str | None,
    typer.Option(help="Such as cpu or cuda:1; by default the GPU, or the CPU if there is none."),
]


def check_out(path: Path | None) -> None:
    """Refuse, before anything is computed, a file that cannot be written.

    Raises:
        OptionError: names --out and what is in the way.
    """
    if path is None:
        return
    if not path.parent.is_dir():
        raise OptionError(f"--out {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise OptionError(f"--out {path}: that is a folder, and a file is written")
