"""Gradio page of `hf-spec ui`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import gradio as gr

from hf_spec.cli.demo.entries import TEXTS
from hf_spec.cli.options import UiSettings
from hf_spec.cli.ui import rendering
from hf_spec.cli.ui.comparison import Comparer, Comparison
from hf_spec.common.errors import OptionError, SpecError

# Maximum number of waiting comparisons; later ones are rejected.
MAX_WAITING = 16
# A click on a word selects its round.
ON_CLICK = """
element.addEventListener('click', (event) => {
  const word = event.target.closest('[data-round]');
  if (word) trigger('click', {round: Number(word.dataset.round)});
});
"""
HIDDEN: dict[str, Any] = {"api_visibility": "private"}


def build_page(comparer: Comparer, name: str, settings: UiSettings) -> gr.Blocks:
    """Return the page of `comparer`; `name` is the name of its model."""

    def compare(text: str, strategy: str, new_tokens: float) -> Iterator[dict[Any, Any]]:
        hidden = {part: type(part)(visible=False) for part in (figures, number, picture)}
        yield {answers: rendering.waiting(strategy), **hidden}
        try:
            comparison = comparer.compare(text, strategy, int(new_tokens))
        except SpecError as error:
            yield {answers: rendering.error(str(error))}
            return
        chosen, count = comparison.fullest, len(comparison.rounds)
        yield {
            state: comparison,
            figures: gr.HTML(rendering.figures(comparison), visible=True),
            answers: rendering.answers(comparison),
            number: gr.Slider(maximum=max(count, 2), value=chosen + 1, visible=count > 1),
            picture: gr.HTML(rendering.round_picture(comparison, chosen), visible=True),
        }

    names, longest = list(comparer.entries), settings.max_new_tokens
    with gr.Blocks(title=f"hf-spec: {name}", analytics_enabled=False) as page:
        state = gr.State()
        gr.Markdown(
            f"# hf-spec\n**{name}** answers twice: plainly, and with drafts that it only verifies. "
            "The text is the same; the number of forward passes of the model is smaller."
        )
        prompt = gr.Textbox(label="Prompt", lines=3, max_lines=10, elem_id="prompt")
        gr.Examples(
            [[text] for text in TEXTS.values()], prompt, example_labels=list(TEXTS), label="Try"
        )
        with gr.Row(equal_height=True):
            strategy = gr.Dropdown(names, value=names[0], label="Strategy", min_width=260)
            new_tokens = gr.Slider(
                2, longest, longest, step=1, label="Maximum new tokens", min_width=260, buttons=[]
            )
        button = gr.Button("Compare", variant="primary", elem_id="compare")
        figures = gr.HTML(visible=False, elem_id="figures")
        answers = gr.HTML(rendering.WELCOME, elem_id="answers", js_on_load=ON_CLICK)
        number = gr.Slider(
            *(1, 2, 1),
            step=1,
            label="Round",
            info="its draft, and what the model accepted",
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
            [state, figures, answers, number, picture],
            # Concurrent comparisons would distort the timing.
            concurrency_limit=1,
            show_progress_on=answers,
            **HIDDEN,
        )
        number.change(_draw, [state, number], picture, show_progress="hidden", **HIDDEN)
        answers.click(_clicked_round, None, number, show_progress="hidden", **HIDDEN)
    return page


def _draw(comparison: Comparison | None, number: float) -> str:
    return "" if comparison is None else rendering.round_picture(comparison, int(number) - 1)


def _clicked_round(event: gr.EventData) -> int:
    return int(event.round) + 1


def serve_page(page: gr.Blocks, settings: UiSettings) -> str:
    """Start serving a page, without requests to other servers, and return its address.

    An address that is not available raises `OptionError`.
    """
    # Disables Gradio's telemetry and version check.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    # Local fonts; the default theme loads fonts from the network.
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
            f"cannot listen on --host {settings.host} --port {settings.port}: {error}; --port 0 "
            "selects a free port"
        ) from error
    return str(address)
