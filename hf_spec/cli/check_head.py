"""`hf-spec check-head`: a thin command over `hf_spec.evaluation.lossless.head_layouts`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hf_spec.cli import options

if TYPE_CHECKING:
    from hf_spec.evaluation.lossless.head_layouts import Agreement


@options.from_settings
def check_head(
    *,
    model: options.ModelArgument,
    head: Annotated[str, typer.Argument(help="Folder or Hub id of an EAGLE or a block head.")],
    prompts: options.Prompts = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Of the model's, all together.")] = 200,
    placement: options.Placement,
) -> None:
    """Find the reading of a published head that fits: a wrong one only drafts worse.

    The model answers prompts, and for each reading that the config of an EAGLE or a block head
    leaves open (layers, rotary base, embedding, norms, what an output drafts) the head's first
    drafts are compared with the model's own tokens.

        hf-spec check-head MODEL HEAD
    """
    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.common.prompts import load_prompts
    from hf_spec.evaluation.lossless.head_layouts import check_readings, own_answers, read_head

    texts, published = load_prompts(prompts, 1), read_head(head)
    target, tokenizer = load_target(model, placement), load_tokenizer(model)
    answers = own_answers(target, [text.encode(tokenizer) for text in texts], new_tokens)
    best = check_readings(published, target, answers, _show)
    typer.echo(
        f"fits: {best.config}({_options(best)})" if best.changes else "fits: as its config says"
    )


def _show(found: Agreement) -> None:
    reading = _options(found) or "its config"
    typer.echo(f"{found.share:6.1%} of {found.compared}  {reading}")


def _options(found: Agreement) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in found.changes)
