"""`hf-spec export`: write a head for another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def export(
    head: Annotated[str, typer.Argument(help="EAGLE-3 head, folder or Hub id.")],
    out: Annotated[Path, typer.Argument(help="New folder for config, weights and a card.")],
    engine: Annotated[Literal["vllm", "sglang"], typer.Option("--for", help="Target engine.")],
    base_model: Annotated[
        str | None,
        typer.Option(
            help="Target model, folder or Hub id; only its config is read. Default: the one that "
            "the head names."
        ),
    ] = None,
) -> None:
    """Write an EAGLE-3 head in the layout of vLLM or SGLang.

    Supports heads of `hf-spec train eagle` and published heads in any layout whose network the
    engine supports. Prints the command that starts the engine.

        hf-spec export my-eagle my-eagle-for-sglang --for sglang
    """
    from hf_spec.methods.exporting import export_head

    typer.echo(f"next: {export_head(head, out, engine, base_model)}")
