"""`hf-spec export`: a head for another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    head: Annotated[str, typer.Argument(help="Folder or Hub id of an EAGLE-3 head.")],
    out: Annotated[Path, typer.Argument(help="New folder for config, weights and a card.")],
    engine: Annotated[
        Literal["vllm", "sglang"], typer.Option("--for", help="The engine that is to read it.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            help="The target, folder or Hub id, of which only the config is read; by default the "
            "one that the head names."
        ),
    ] = None,
) -> None:
    """Write an EAGLE-3 head in the layout that vLLM or SGLang reads.

    Heads of `hf-spec train eagle` and published ones, whatever their layout; heads whose network
    the engine does not have are refused. The command that starts the engine is printed.

        hf-spec export my-eagle my-eagle-for-sglang --for sglang
    """
    from hf_spec.methods.exporting import export_head

    typer.echo(f"next: {export_head(head, out, engine, model)}")
