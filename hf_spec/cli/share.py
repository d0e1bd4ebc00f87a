"""`hf-spec import-head`, `export`, `shrink`, `card` and `push`: files of heads and adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from hf_spec.cli.options import FILE

Folder = Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of an adapter.")]


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


def export(
    head: Annotated[str, typer.Argument(help="EAGLE-3 head, folder or Hub id.")],
    out: Annotated[Path, typer.Argument(help="New folder for config, weights and a card.")],
    engine: Annotated[Literal["vllm", "sglang"], typer.Option("--for", help="Target engine.")],
    base_model: Annotated[
        str | None, typer.Option(help="Target model, folder or Hub id. Default: the head's.")
    ] = None,
) -> None:
    """Write an EAGLE-3 head in the layout of vLLM or SGLang.

    Supports heads of `hf-spec train eagle` and published heads in any layout whose network the
    engine supports. Prints the command that starts the engine.

        hf-spec export my-eagle my-eagle-for-sglang --for sglang
    """
    from hf_spec.methods.exporting import export_head

    typer.echo(f"next: {export_head(head, out, engine, base_model)}")


def shrink(
    folder: Folder, bits: Annotated[int, typer.Option(help="Bits per matrix weight, 8 or 4.")] = 8
) -> None:
    """Store an adapter in 8 or 4 bits.

    The file, changed in place, is smaller; memory use does not change. The output stays the
    target's. 4 bits may lower the acceptance rate: compare with hf-spec bench.

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


def card(
    folder: Folder,
    results: Annotated[
        Path | None, typer.Option(**FILE, help="JSON file of hf-spec bench.")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Target model, Hub id. Default: as trained.")
    ] = None,
    weights_license: Annotated[
        str | None, typer.Option("--license", help="License of the weights, e.g. apache-2.0.")
    ] = None,
    dataset: Annotated[
        list[str] | None, typer.Option(help="Training set, Hub id; may be repeated.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a card.")] = False,
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


def push(
    folder: Folder,
    repo_id: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub; created if needed.")],
    private: Annotated[bool, typer.Option("--private", help="Create it as private.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch. Default: main.")] = None,
) -> None:
    """Upload an adapter to the Hugging Face Hub.

    Uploads weights, config, model card and `custom_generate/` in one commit, and no other files of
    the folder. Uses the token of `hf auth login` or of the variable HF_TOKEN.

        hf-spec push my-head OWNER/my-head --private
    """
    from hf_spec.adapters.folder import load_adapter
    from hf_spec.adapters.hub import HubRepo, push_adapter

    typer.echo(push_adapter(load_adapter(folder), HubRepo(repo_id, revision), private))
