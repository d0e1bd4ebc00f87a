"""`hf-spec check-head`, a thin command over `hf_spec.evaluation.lossless.head_layouts`."""

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
    head: Annotated[str, typer.Argument(help="EAGLE or block head, folder or Hub id.")],
    prompts: options.Prompts = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum new tokens in total.")] = 200,
    placement: options.Placement,
) -> None:
    """Find the layout of a published head that fits.

    The config of an EAGLE or block head leaves some options ambiguous: layers, rotary base,
    embedding, norms, and the position that an output drafts. For each value, the head's first
    drafts are compared with the model's own answers to prompts. A wrong layout only drafts worse.

        hf-spec check-head MODEL HEAD
    """
    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.common.prompts import load_prompts
    from hf_spec.evaluation.lossless.head_layouts import (
        choose_layout,
        read_ambiguous_head,
        target_answers,
    )

    texts = load_prompts(prompts, options.prompts_per_task(None, prompts, 1))
    published = read_ambiguous_head(head)
    target, tokenizer = load_target(model, placement), load_tokenizer(model)
    answers = target_answers(target, [text.encode(tokenizer) for text in texts], max_new_tokens)
    best = choose_layout(published, target, answers, _print_agreement)
    overrides = _options(best)
    typer.echo(f"fits: {best.config}({overrides})" if overrides else "fits: as its config says")


def _print_agreement(agreement: Agreement) -> None:
    layout = _options(agreement) or "its config"
    typer.echo(f"{agreement.share:6.1%} of {agreement.compared}  {layout}")


def _options(agreement: Agreement) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in agreement.config_overrides)
