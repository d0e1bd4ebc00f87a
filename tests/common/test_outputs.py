"""Statistics of a generation: the counters and how they add up."""

from __future__ import annotations

import json

import pytest
import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hf_spec.common.outputs import RowStats, SpecGenerateOutput, SpecStats, collect_stats
from tests import tiny_models


def test_rounds_of_one_row_add_up() -> None:
    row = RowStats()
    row.count(drafted=5, depth=3, accepted=2, gained=3)
    row.count(drafted=0, depth=0, accepted=0, gained=1)
    row.count(drafted=4, depth=4, accepted=4, gained=4)
    assert (row.target_forwards, row.drafted_tokens, row.accepted_tokens) == (3, 9, 6)
    assert row.drafted_by_position == [2, 2, 2, 1]
    assert row.accepted_by_position == [2, 2, 1, 1]
    assert row.tau == 2


def test_tokens_that_a_stop_cut_off_are_taken_back() -> None:
    row = RowStats()
    row.count(drafted=5, depth=3, accepted=2, gained=3)
    row.count(drafted=4, depth=4, accepted=4, gained=5)
    row.discount([3, 4, 0])
    assert (row.target_forwards, row.drafted_tokens) == (2, 9), "these were run"
    assert (row.accepted_tokens, row.new_tokens) == (4, 5)
    assert row.accepted_by_position == [2, 2]
    assert row.drafted_by_position == [2, 2, 2, 1]
    row.discount([2, 0, 1, 2])
    assert row.accepted_by_position == [1]


def test_rows_of_different_depth_add_up() -> None:
    first, second = RowStats(), RowStats()
    first.count(drafted=3, depth=3, accepted=1, gained=2)
    second.count(drafted=1, depth=1, accepted=1, gained=2)
    second.count(drafted=1, depth=1, accepted=0, gained=1)
    stats = SpecStats([first, second], target_forwards=2)
    assert (stats.drafted_tokens, stats.accepted_tokens) == (5, 2)
    assert stats.drafted_by_position == [3, 1, 1]
    assert stats.accepted_by_position == [2]
    assert stats.tau == pytest.approx(2 / 3)


def test_nothing_generated_yet_divides_by_nothing() -> None:
    assert RowStats().tau == 0
    assert SpecStats([]).tau == 0
    assert SpecStats([RowStats()]).accepted_by_position == []


def test_generations_add_up_and_are_written_as_json() -> None:
    first, second = RowStats(), RowStats()
    first.count(drafted=4, depth=4, accepted=3, gained=4)
    second.count(drafted=2, depth=2, accepted=0, gained=1)
    one = SpecStats([first], 1, draft_seconds=1.0, counters={"rounds": 1, "merges": 0})
    other = SpecStats([second], 2, verify_seconds=2.0, other_seconds=0.5, counters={"rounds": 2})
    one.packed_weight_bytes, other.packed_weight_bytes = 5, 6
    one.kv_pool_bytes, one.kv_pool_growths, one.memory_retries = 300, 2, 1
    other.kv_pool_bytes, other.kv_pool_growths, other.memory_retries = 200, 1, 1
    both = one + other
    assert both.rows == [first, second]
    assert both.packed_weight_bytes == 6
    assert (both.kv_pool_bytes, both.kv_pool_growths, both.memory_retries) == (300, 3, 2)
    assert (both.target_forwards, both.rounds, both.new_tokens) == (3, 2, 5)
    assert both.counters == {"rounds": 3, "merges": 0}
    assert (both.seconds, both.tokens_per_second) == (3.5, 5 / 3.5)
    assert (both.tau, both.acceptance) == (1.5, 0.5)
    written = json.loads(json.dumps(both.to_dict()))
    assert written["accepted_by_position"] == [1, 1, 1]
    assert written["drafted_by_position"] == [2, 2, 1, 1]
    assert all(written[name] == getattr(both, name) for name in written)
    assert "rows" not in written


class TestPrinted:
    def test_one_row_by_hand(self) -> None:
        row = RowStats()
        row.count(drafted=5, depth=3, accepted=2, gained=3)
        row.count(drafted=3, depth=3, accepted=1, gained=2)
        stats = SpecStats([row], 2, draft_forwards=11, counters={"idle_rounds": 1})
        stats.draft_seconds, stats.verify_seconds, stats.other_seconds = 0.25, 1.5, 0.5
        assert str(stats).splitlines() == [
            "new tokens          5",
            "target forwards     2  2.50 tokens each",
            "draft tokens        8",
            "accepted            3  38%; by position: 100%, 50%",
            "tau              1.50  accepted draft tokens per target forward",
            "draft forwards     11",
            "seconds          2.25  draft 0.25, target 1.50, other 0.50",
            "tokens/s          2.2",
            "idle rounds         1",
        ]
        assert str(row).splitlines() == str(stats).splitlines()[:5]

    def test_a_padded_batch(self) -> None:
        rows = [RowStats(), RowStats()]
        for row, gained in zip(rows, (1, 4), strict=True):
            row.count(drafted=0, depth=0, accepted=0, gained=gained)
        stats = SpecStats(rows, target_forwards=1, target_tokens=8, target_padding=2)
        lines = str(stats).splitlines()
        assert "rows                2" in lines
        assert "target forwards     1  2.50 tokens each" in lines
        assert "padding             2  25% of the target's work" in lines
        # Without drafts there are no rows about them.
        assert not any(line.startswith(("accepted", "tau")) for line in lines)

    def test_nothing_yet(self) -> None:
        assert str(SpecStats([])).startswith("new tokens")
        assert str(RowStats()).startswith("new tokens")

    def test_repr_names_every_field(self) -> None:
        text = repr(SpecStats([RowStats()], target_forwards=3))
        assert text.startswith("SpecStats(rows=[RowStats(")
        assert "target_forwards=3" in text


@pytest.mark.by_default(kind=("ragged",))
@pytest.mark.parametrize("strategy", tiny_models.STRATEGIES)
@pytest.mark.parametrize("kind", ["one", "ragged"])
def test_statistics_of_a_generation_are_consistent(strategy: str, kind: str) -> None:
    output = tiny_models.build("gemma3").generate(
        **tiny_models.prompts("gemma3", kind),
        max_new_tokens=16,
        do_sample=False,
        return_dict_in_generate=True,
        **tiny_models.speculation("gemma3", strategy),
    )
    assert isinstance(output, SpecGenerateOutput)
    assert isinstance(output, GenerateDecoderOnlyOutput)
    stats = output.spec_stats
    for row in stats.rows:
        # Sixteen tokens: the accepted ones and a bonus token per round, optional in the last.
        assert 16 - row.target_forwards <= row.accepted_tokens <= 17 - row.target_forwards
        assert row.target_forwards <= stats.target_forwards
        assert sum(row.accepted_by_position) == row.accepted_tokens
        assert row.drafted_tokens >= sum(row.drafted_by_position)
        pairs = zip(row.accepted_by_position, row.drafted_by_position, strict=False)
        assert all(accepted <= drafted for accepted, drafted in pairs)
    assert stats.accepted_tokens == sum(stats.accepted_by_position)
    assert (stats.accepted_tokens > 0) == (strategy != "none")
    assert (stats.draft_forwards > 0) == (strategy not in {"lookup", "none", "sdsat"})
    assert bool(stats.counters) == (strategy != "none")
    assert min(stats.draft_seconds, stats.verify_seconds, stats.other_seconds) > 0
    assert output.scores is None
    assert output.logits is None


def test_the_output_unpacks_like_transformers_own() -> None:
    output = SpecGenerateOutput(sequences=torch.zeros(1, 2), spec_stats=SpecStats([]))
    assert list(output) == ["sequences", "spec_stats"]
    assert output["spec_stats"] is output.spec_stats
    assert torch.equal(output[0], output.sequences)


def test_statistics_are_collected_where_no_output_shows_them() -> None:
    model, prompt = tiny_models.build("llama"), tiny_models.repetitive_prompt()
    call = {"max_new_tokens": 5, "do_sample": False, "spec_strategy": "lookup"}
    with collect_stats() as outer:
        model.generate(prompt, **call)
        with collect_stats() as inner:
            model.generate_batch(prompt.tolist(), **call)
        model.generate(prompt, max_new_tokens=5)
    model.generate(prompt, **call)
    assert [stats.new_tokens for stats in outer] == [5]
    assert [stats.new_tokens for stats in inner] == [5]
    assert sum([*outer, *inner], SpecStats([])).new_tokens == 10
