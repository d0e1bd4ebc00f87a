"""`hf-spec card`: the model card of an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def card(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder of an adapter.")
    ],
    results: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="JSON file of `hf-spec bench --out`."),
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Hub id of the base; its name in training by default.")
    ] = None,
    weights_license: Annotated[
        str | None, typer.Option("--license", help="Of the weights, such as apache-2.0.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Hub id of texts it learned from; may be repeated.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace the card that is there.")
    ] = False,
) -> None:
    """Write the model card of an adapter.

    It says what the adapter is for, how it is used, and what was measured when it was trained and,
    with --results, in a benchmark.

        hf-spec card my-head --results results.json --license apache-2.0
    """
    import hf_spec.methods.builtin  # noqa: F401 - registers the adapter methods
    from hf_spec.adapters.card import write_card
    from hf_spec.adapters.folder import load_adapter

    path = write_card(
        load_adapter(folder),
        results=results,
        base_model=base_model,
        license=weights_license,
        datasets=dataset or (),
        overwrite=overwrite,
    )
    typer.echo(path)
