"""HTML of a comparison on the page of `hf-spec ui`.

CSS animations replay both answers: each piece of text appears after its recorded time. Drawing
during the generation would slow down the timed work.
"""

from __future__ import annotations

from html import escape

from hf_spec.cli.answer.console_streamer import printable
from hf_spec.cli.demo.replay import Lane, card
from hf_spec.cli.ui.comparison import Comparison
from hf_spec.evaluation.trace.pictures import ACCEPTED, DARK, INK, PADDING

WELCOME = (
    '<p class="hs-welcome">Both answers appear here: plain, token by token, and with drafts.</p>'
)
WAITING = (
    '<p class="hs-welcome">Timing plain generate(), then {strategy}, each after a short untimed '
    "run.</p>"
)
LEGEND = (
    '<p class="hs-legend"><span class="hs-drafted">drafted and accepted</span> '
    "<span>the model's own token, one per round</span> "
    "<span>click a word to show its round</span></p>"
)
# Colors of Gradio's theme, except for secondary text, whose contrast is too low there.
STYLE = f"""
.gradio-container {{ --quiet: color-mix(in srgb, var(--body-text-color) 72%, transparent); }}
#figures .html-container, #answers .html-container, #picture .html-container {{ padding: 0; }}
#round [data-testid="block-info"] + *, #round .info {{ color: var(--quiet); }}
.hs-figures {{ display: flex; flex-wrap: wrap; gap: 12px; margin: 0; }}
.hs-figures > div {{ flex: 1 1 120px; }}
.hs-answers {{ display: grid; gap: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr)); }}
.hs-figures > div, .hs-answers > section, .hs-picture {{
  border: 1px solid var(--border-color-primary); border-radius: 8px;
  background: var(--background-fill-primary); }}
.hs-figures > div, .hs-answers > section {{ padding: 12px 14px; }}
.hs-figures dt {{ font-size: 13px; line-height: 1.35; color: var(--quiet); }}
.hs-figures dd {{ margin: 0 0 2px; font-size: 20px; font-weight: 600; white-space: nowrap;
  font-variant-numeric: tabular-nums; }}
.hs-figures .hs-bad {{ border: 2px solid {DARK[PADDING]}; }}
.hs-answers header {{ margin-bottom: 8px; padding-bottom: 6px;
  border-bottom: 1px solid var(--border-color-primary); }}
.hs-answers h3 {{ margin: 0; font-size: 15px; font-weight: 600; overflow-wrap: anywhere; }}
.hs-clock {{ display: block; font-size: 13px; font-variant-numeric: tabular-nums; }}
.hs-text {{ white-space: pre-wrap; overflow-wrap: anywhere; font-size: 15px; line-height: 1.6; }}
.hs-drafted {{ background: {ACCEPTED}; color: {INK}; border-radius: 3px;
  -webkit-box-decoration-break: clone; box-decoration-break: clone; }}
.dark .hs-drafted {{ background: {DARK[ACCEPTED]}; color: {DARK[INK]}; }}
[data-round] {{ cursor: pointer; }}
.hs-welcome, .hs-legend {{ font-size: 13px; color: var(--quiet); margin: 0; }}
.hs-welcome {{ padding: 10px 0; }}
.hs-refused {{ border-left: 4px solid {DARK[PADDING]}; padding: 8px 12px; margin: 0; }}
.hs-legend {{ display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 8px; }}
.hs-legend .hs-drafted {{ padding: 0 6px; }}
.hs-picture {{ overflow: auto; max-height: 75vh; }}
.hs-picture svg {{ display: block; margin: 0 auto; max-width: none; }}
@keyframes hs-appear {{ from {{ opacity: 0; }} to {{ opacity: 1; }} }}
.hs-late {{ animation: hs-appear 1ms linear backwards; }}
@media (prefers-reduced-motion: reduce) {{ .hs-late {{ animation: none; }} }}
"""


def waiting(strategy: str) -> str:
    """Return the message during the timing."""
    return WAITING.format(strategy=escape(strategy))


def error(reason: str) -> str:
    """Return an error or a warning."""
    return f'<p class="hs-refused" role="alert">{escape(reason)}</p>'


def figures(comparison: Comparison) -> str:
    """Return the warning, and tiles with speedup, tau, speed, forward passes and the verdict."""
    ours = comparison.records[1]
    forwards, speeds, verdict = card(*comparison.records)
    why = "the two texts, token by token"
    if not ours.identical:
        why = "ties may differ; hf-spec verify classifies them"
    shown = [
        (f"{ours.ratio:.2f}×", "the speed of plain generate()"),
        (f"{ours.tau:.2f}", "tau: accepted drafts per forward pass"),
        (speeds, "tokens per second"),
        (forwards, "forward passes of the model"),
        (verdict, why),
    ]
    kinds = ["", "", "", "", "" if ours.identical else ' class="hs-bad"']
    tiles = (
        f"<div{kind}><dd>{escape(value)}</dd><dt>{escape(label)}</dt></div>"
        for kind, (value, label) in zip(kinds, shown, strict=True)
    )
    warning = error(comparison.warning) if comparison.warning else ""
    return f'{warning}<dl class="hs-figures">{"".join(tiles)}</dl>'


def answers(comparison: Comparison) -> str:
    """Return both texts side by side, replayed from the same start."""
    plain, ours = comparison.lanes
    sides = [
        _answer(plain, "plain generate()", rounds=False),
        _answer(ours, ours.title, rounds=True),
    ]
    return f'<div class="hs-answers">{"".join(sides)}</div>{LEGEND}'


def _answer(lane: Lane, title: str, rounds: bool) -> str:
    pieces = []
    for piece in lane.pieces:
        kinds = "hs-late hs-drafted" if piece.drafted else "hs-late"
        number = f' data-round="{piece.block}"' if rounds else ""
        pieces.append(
            f'<span class="{kinds}"{number} style="animation-delay:{piece.seconds:.3f}s">'
            f"{escape(printable(piece.text))}</span>"
        )
    clock = f'<span class="hs-clock hs-late" style="animation-delay:{lane.seconds:.3f}s">'
    head = f"<header><h3>{escape(title)}</h3>{clock}{lane.clock(lane.seconds)}</span></header>"
    return f'<section>{head}<div class="hs-text">{"".join(pieces)}</div></section>'


def round_picture(comparison: Comparison, number: int) -> str:
    """Return the picture of a round, counted from 0, and underline its words in the answer."""
    marked = f'.hs-text [data-round="{number}"]'
    rule = f"{marked}{{text-decoration:underline 2px;text-underline-offset:4px}}"
    return f'<style>{rule}</style><div class="hs-picture">{comparison.picture(number)}</div>'
