"""The page of `hf-spec ui`; imported where Gradio is installed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import gradio as gr

from hf_spec.cli.demo.entries import TEXTS
from hf_spec.cli.ui import rendering
from hf_spec.cli.ui.comparison import Comparer, Comparison
from hf_spec.cli.ui.settings import UiSettings
from hf_spec.common.errors import OptionError, SpecError

# Answers that wait for their turn; whoever comes later is asked to try again.
MAX_WAITING = 16
# A click on a word of the answer names its round.
ON_CLICK = """
element.addEventListener('click', (event) => {
  const word = event.target.closest('[data-round]');
  if (word) trigger('click', {round: Number(word.dataset.round)});
});
"""
HIDDEN: dict[str, Any] = {"api_visibility": "private"}


def build_page(comparer: Comparer, name: str, settings: UiSettings) -> gr.Blocks:
    """The page on which `comparer` answers; `name` is that of its model."""

    def compare(text: str, strategy: str, new_tokens: float) -> Iterator[dict[Any, Any]]:
        hidden = {part: type(part)(visible=False) for part in (figures, number, picture)}
        yield {answers: rendering.waiting(strategy), **hidden}
        try:
            found = comparer.compare(text, strategy, int(new_tokens))
        except SpecError as error:
            yield {answers: rendering.refused(str(error))}
            return
        chosen, count = found.fullest, len(found.rounds)
        yield {
            kept: found,
            figures: gr.HTML(rendering.figures(found), visible=True),
            answers: rendering.answers(found),
            number: gr.Slider(maximum=max(count, 2), value=chosen + 1, visible=count > 1),
            picture: gr.HTML(rendering.round_picture(found, chosen), visible=True),
        }

    names, longest = list(comparer.entries), settings.max_new_tokens
    with gr.Blocks(title=f"hf-spec: {name}", analytics_enabled=False) as page:
        kept = gr.State()
        gr.Markdown(
            f"# hf-spec\n**{name}** answers twice: as it is, and with drafts that it only has to "
            "check. The text is the same; what changes is how many forwards of the model it takes."
        )
        prompt = gr.Textbox(label="Prompt", lines=3, max_lines=10, elem_id="prompt")
        gr.Examples(
            [[text] for text in TEXTS.values()], prompt, example_labels=list(TEXTS), label="Try"
        )
        with gr.Row(equal_height=True):
            strategy = gr.Dropdown(names, value=names[0], label="Strategy", min_width=260)
            new_tokens = gr.Slider(
                2,
                longest,
                longest,
                step=1,
                label="Longest answer, in tokens",
                min_width=260,
                buttons=[],
            )
        button = gr.Button("Compare", variant="primary", elem_id="compare")
        figures = gr.HTML(visible=False, elem_id="figures")
        answers = gr.HTML(rendering.WELCOME, elem_id="answers", js_on_load=ON_CLICK)
        number = gr.Slider(
            *(1, 2, 1),
            step=1,
            label="Round",
            info="what was drafted in it, and what the model made of it",
            visible=False,
            interactive=True,
            buttons=[],
            elem_id="round",
        )
        picture = gr.HTML(visible=False, elem_id="picture")
        gr.on(
            [button.click, prompt.submit],
            compare,
            [prompt, strategy, new_tokens],
            [kept, figures, answers, number, picture],
            # One answer at a time has the machine to itself, or the times would be wrong.
            concurrency_limit=1,
            show_progress_on=answers,
            **HIDDEN,
        )
        number.change(_drawn, [kept, number], picture, show_progress="hidden", **HIDDEN)
        answers.click(_clicked, None, number, show_progress="hidden", **HIDDEN)
    return page


def _drawn(found: Comparison | None, number: float) -> str:
    return "" if found is None else rendering.round_picture(found, int(number) - 1)


def _clicked(event: gr.EventData) -> int:
    return int(event.round) + 1


def serve_page(page: gr.Blocks, settings: UiSettings) -> str:
    """Begin to serve a page, and return its address; nobody else is asked for anything.

    Raises:
        OptionError: if the port is taken.
    """
    # Without it Gradio counts its users, and asks for newer versions.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    # Fonts of the reader's own machine; a theme may name some that come from elsewhere.
    theme = gr.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"]
    )
    try:
        _, address, _ = page.queue(max_size=MAX_WAITING).launch(
            server_name=settings.host,
            server_port=settings.port or None,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            footer_links=[],
            theme=theme,
            css=rendering.STYLE,
        )
    except OSError as error:
        raise OptionError(
            f"--host {settings.host} --port {settings.port} cannot be listened at: {error}; port 0 "
            "takes one that is free"
        ) from error
    return str(address)
