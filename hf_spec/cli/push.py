"""`hf-spec push`: upload an adapter to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def push(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder of an adapter.")
    ],
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub; created if needed.")],
    private: Annotated[
        bool, typer.Option("--private", help="Create a new repository as private.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch, created if needed. Default: the main branch.")
    ] = None,
) -> None:
    """Upload an adapter to the Hugging Face Hub.

    Uploads weights, config, model card and `custom_generate/` in one commit, and no other files of
    the folder. Uses the token of `hf auth login` or of the variable HF_TOKEN.

        hf-spec push my-head OWNER/my-head --private
    """
    from hf_spec.adapters.folder import load_adapter
    from hf_spec.adapters.hub import Place, push_adapter

    typer.echo(push_adapter(load_adapter(folder), Place(repo_id, revision), private))
