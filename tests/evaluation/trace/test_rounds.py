"""Recorded rounds add up to the output, which is that of `generate()`."""

from __future__ import annotations

import pytest
import torch

import hf_spec
from hf_spec.evaluation.trace.rounds import record_rounds
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
        # The last round may bring more than there is room for; a row that ended is filled up.
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
    """A streamer is one, and what cannot be served is refused as there."""
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
