"""`hf-spec shrink`: an adapter in fewer bits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def shrink(
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="Folder of an adapter; changed.")
    ],
    bits: Annotated[int, typer.Option(help="8 or 4 for each weight of a matrix.")] = 8,
) -> None:
    """Store an adapter in 8 or 4 bits.

    The download is smaller, in memory it stays as large. The output stays the
    target's, whatever the drafts are. A Falcon head drafted as well in 8 bits as in 16; in 4, a
    fiftieth less was accepted. Compare with hf-spec bench.

        hf-spec shrink my-head --bits 8
    """
    from dataclasses import replace

    from hf_spec.adapters.adapter import WEIGHTS_NAME
    from hf_spec.adapters.folder import load_adapter

    adapter = load_adapter(folder)
    before = (folder / WEIGHTS_NAME).stat().st_size
    replace(adapter, bits=bits).save_pretrained(adapter.own_folder)
    after = (folder / WEIGHTS_NAME).stat().st_size
    typer.echo(f"{folder / WEIGHTS_NAME}: {before / 1e6:.2f} MB before, {after / 1e6:.2f} MB now")
