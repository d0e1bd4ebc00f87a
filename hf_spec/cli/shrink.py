"""`hf-spec shrink`: quantize a stored adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def shrink(
    folder: Annotated[
        Path,
        typer.Argument(
            exists=True, file_okay=False, help="Folder of an adapter; changed in place."
        ),
    ],
    bits: Annotated[int, typer.Option(help="Bits per matrix weight, 8 or 4.")] = 8,
) -> None:
    """Store an adapter in 8 or 4 bits.

    The file is smaller; memory use does not change. The output stays the target's. 4 bits may lower
    the acceptance rate: compare with hf-spec bench.

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
