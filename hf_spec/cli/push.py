"""`hf-spec push`: an adapter onto the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def push(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder of an adapter.")
    ],
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub; made if need be.")],
    private: Annotated[
        bool, typer.Option("--private", help="Only you see a repository that is made.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch, made if need be; the main one by default.")
    ] = None,
) -> None:
    """Put an adapter on the Hugging Face Hub.

    Sends weights, config, model card and `custom_generate/` in one commit, nothing else of the
    folder. The token is that of `hf auth login`, or the variable HF_TOKEN.

        hf-spec push my-head OWNER/my-head --private
    """
    from hf_spec.adapters.folder import load_adapter
    from hf_spec.adapters.hub import Place, push_adapter

    typer.echo(push_adapter(load_adapter(folder), Place(repo_id, revision), private))
