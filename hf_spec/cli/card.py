"""`hf-spec card`: write the model card of an adapter."""

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
        str | None, typer.Option(help="Target model, Hub id. Default: its name in training.")
    ] = None,
    weights_license: Annotated[
        str | None,
        typer.Option("--license", help="License of the weights, for example apache-2.0."),
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Hub id of a training set; may be repeated.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing card.")
    ] = False,
) -> None:
    """Write the model card of an adapter.

    The card has the purpose and usage of the adapter and the metrics of its training and, with
    --results, of a benchmark.

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
