"""Recorded rounds add up to the output of `generate()`; pictures show drafts and verdicts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import hf_spec
from hf_spec.evaluation.trace.pictures import ACCEPTED, ROWS, Canvas
from hf_spec.evaluation.trace.rounds import Round, draw_round, record_rounds
from tests import tiny_models

NEW_TOKENS = 16


def test_rounds_add_up_to_the_output() -> None:
    model = tiny_models.build("llama")
    batch = tiny_models.prompts("llama", "ragged")
    plain = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    output, rounds = record_rounds(
        model, batch, "lookup", max_new_tokens=NEW_TOKENS, do_sample=False
    )
    assert torch.equal(output, plain)
    width = batch["input_ids"].shape[1]
    for row, expected in enumerate(plain[:, width:].tolist()):
        found = [token for one in rounds for token in one.verdict.tokens(row)]
        # The last round may exceed the length limit; a row that ended is padded.
        shorter = min(len(found), len(expected))
        assert found[:shorter] == expected[:shorter]
        assert len(found) >= len([token for token in expected if token != 0])
    assert not any(one.graphs for one in rounds)


def test_graphs_of_a_draft_model_and_their_accepted_paths() -> None:
    model = tiny_models.build("llama")
    batch = tiny_models.prompts("llama", "ragged")
    _, rounds = record_rounds(
        model,
        batch,
        hf_spec.GsdConfig(max_draft_tokens=3, min_probability=0.0, merge_length=0),
        hf_spec.truncated_draft(model, num_layers=2),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
    )
    assert any(graph.num_merges for one in rounds for graph in one.graphs.values())
    accepted = 0
    for one in rounds:
        tokens = one.verdict.tree.tokens
        for row, graph in one.graphs.items():
            nodes = one.accepted_in_graph(row)
            path = [tokens[node] for node in one.verdict.accepted[row]]
            assert [graph.tokens[node] for node in nodes] == path
            accepted += len(nodes)
    assert accepted > 0


def test_settings_are_those_of_generate() -> None:
    """A streamer is supported, and unsupported settings raise the same errors."""
    model = tiny_models.build("llama")
    batch = tiny_models.prompts("llama", "ragged")
    streamed: dict[int, list[int]] = {}
    streamer = hf_spec.BatchStreamer(lambda row, new: streamed.setdefault(row, []).extend(new))
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "streamer": streamer}
    output, _ = record_rounds(model, batch, "lookup", **settings)
    for row, tokens in streamed.items():
        assert output[row, batch["input_ids"].shape[1] :].tolist()[: len(tokens)] == tokens
    assert streamed.keys() == set(range(len(output)))
    with pytest.raises(hf_spec.UnsupportedError, match="num_beams"):
        record_rounds(model, batch, "lookup", num_beams=2)
    with pytest.raises(hf_spec.AssistantError, match="needs"):
        record_rounds(model, batch, "tree")


def decode(token_ids: Sequence[int]) -> str:
    return f"t{token_ids[0]}"


def rounds_of(spec_strategy: Any, assistant: Any = None, kind: str = "one") -> list[Round]:
    batch = tiny_models.prompts("llama", kind)
    settings = {"max_new_tokens": 16, "do_sample": False}
    model = tiny_models.build("llama")
    return record_rounds(model, batch, spec_strategy, assistant, **settings)[1]


def labels(canvas: Canvas, fill: str | None = None) -> list[str]:
    """Return the words in boxes with the color `fill`, or in all boxes."""
    found = re.findall(r'rx="3" fill="(\S+)".*/>\n<text .*>(.*)</text>', str(canvas))
    return [word for color, word in found if fill in (None, color)]


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
