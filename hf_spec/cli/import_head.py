"""`hf-spec import-head`: convert a published pickle to safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def import_head(
    repo: Annotated[str, typer.Argument(help="Published head, folder or Hub id.")],
    out: Annotated[Path, typer.Argument(help="New folder for config, safetensors and a card.")],
) -> None:
    """Convert a published head from pickle to safetensors.

    Strategies never load pickles. This command loads only their tensors (torch.load with
    weights_only=True).

        hf-spec import-head yuhuili/EAGLE-LLaMA3-Instruct-8B my-eagle
    """
    from hf_spec.adapters.importing import import_head as convert

    typer.echo(convert(repo, out))
