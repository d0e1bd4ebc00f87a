"""The picture of a round has what was drafted, what was accepted and the bonus token."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest

import hf_spec
from hf_spec.evaluation.trace.drawing import draw_round
from hf_spec.evaluation.trace.pictures import ACCEPTED, ROWS, Canvas
from hf_spec.evaluation.trace.rounds import Round, record_rounds
from tests import tiny_models


def decode(token_ids: Sequence[int]) -> str:
    return f"t{token_ids[0]}"


def rounds_of(spec_strategy: Any, assistant: Any = None, kind: str = "one") -> list[Round]:
    batch = tiny_models.prompts("llama", kind)
    settings = {"max_new_tokens": 16, "do_sample": False}
    model = tiny_models.build("llama")
    return record_rounds(model, batch, spec_strategy, assistant, **settings)[1]


def labels(canvas: Canvas, fill: str | None = None) -> list[str]:
    """The words in the boxes of a colour."""
    found = re.findall(r'rx="3" fill="(\S+)".*/>\n<text .*>(.*)</text>', str(canvas))
    return [word for colour, word in found if fill in (None, colour)]


@pytest.mark.parametrize("strategy", ["lookup", "tree", "falcon", "sdsat", "auto"])
def test_a_tree_is_what_the_target_saw(strategy: str) -> None:
    rounds = rounds_of(**tiny_models.speculation("llama", strategy))
    assert any(one.verdict.accepted[0] for one in rounds)
    for one in rounds:
        canvas, verdict = draw_round(one, decode), one.verdict
        sent = [token for token in verdict.tree.tokens if token >= 0]
        *accepted, bonus = verdict.tokens(0)
        assert labels(canvas) == [f"t{token}" for token in (*sent, bonus)]
        assert labels(canvas, ROWS[0]) == [f"t{bonus}"]
        assert sorted(labels(canvas, ACCEPTED)) == sorted(f"t{t}" for t in (sent[0], *accepted))


def test_virtual_nodes_are_left_out() -> None:
    rounds = rounds_of(**tiny_models.speculation("llama", "sdsat"))
    assert any(token < 0 for one in rounds for token in one.verdict.tree.tokens)


def test_a_graph_is_drawn_where_words_were_merged() -> None:
    config = hf_spec.GsdConfig(
        max_draft_tokens=3, max_nodes=12, min_probability=0.0, merge_length=0, children=4
    )
    rounds = rounds_of(config, hf_spec.truncated_draft(tiny_models.build("llama"), num_layers=2))
    merged = [one for one in rounds if one.graphs[0].num_merges]
    assert merged
    for one in merged:
        canvas = draw_round(one, decode)
        assert labels(canvas) == [f"t{token}" for token in one.graphs[0].tokens]
        accepted = len(one.verdict.accepted[0])
        assert len(labels(canvas, ACCEPTED)) == (accepted + 1 if accepted else 0)
        assert f"{accepted} accepted, then the bonus token: t{one.verdict.bonus[0]}" in str(canvas)


def test_any_row_of_a_batch() -> None:
    for one in rounds_of("lookup", kind="ragged"):
        for row, bonus in enumerate(one.verdict.bonus):
            if bonus is not None:
                assert labels(draw_round(one, decode, row), ROWS[0]) == [f"t{bonus}"]
