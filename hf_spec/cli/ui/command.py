"""Options of `hf-spec ui`; other imports follow after the options are checked."""

from __future__ import annotations

import importlib.util
from threading import Event

import typer

from hf_spec.cli import options
from hf_spec.common.errors import OptionError
from hf_spec.common.installing import how_to_install


@options.from_settings
def ui(
    *,
    model: options.ModelArgument,
    strategy: options.Strategies = None,
    assistant: options.Assistants = None,
    settings: options.UiSettings,
    placement: options.Placement,
) -> None:
    """Compare plain and speculative output in the browser.

    The page offers the named strategies, by default auto. Both outputs are greedy, timed one after
    the other, and replayed side by side. Accepted draft tokens are green, and the draft of each
    round is drawn. By default only this machine can open the page; Ctrl-C ends it.

        hf-spec ui MODEL
        hf-spec ui MODEL --strategy lookup --strategy falcon@HEAD
        hf-spec ui MODEL --assistant DRAFT --max-new-tokens 256
    """
    if importlib.util.find_spec("gradio") is None:
        raise OptionError(f"the page needs gradio: {how_to_install('ui')}")
    from hf_spec.cli.demo.watch import load_warning
    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.cli.ui.comparison import Comparer
    from hf_spec.methods.entries import parse_entries

    if warning := load_warning():
        typer.echo(warning, err=True)
    entries = parse_entries(strategy or ["auto"], assistant or ())
    comparer = Comparer(load_target(model, placement), load_tokenizer(model), entries)
    # Importing gradio takes seconds.
    from hf_spec.cli.ui.page import build_page, serve_page

    page = build_page(comparer, model, settings)
    try:
        address = serve_page(page, settings)
        typer.echo(f"{model} with {', '.join(comparer.entries)} at {address}", err=True)
        Event().wait()
    finally:
        page.close(verbose=False)
