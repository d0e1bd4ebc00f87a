"""One method under the cost model: configured sizes are kept, costs decide the rest."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_spec
from hf_spec import DiscoConfig, DraftConfig, FalconConfig, GsdConfig, LookupConfig, TreeConfig
from hf_spec.common.errors import OptionError, UnsupportedError
from hf_spec.drafting.cost_model import adaptive_length_drafter
from hf_spec.drafting.cost_model.adaptive_length_drafter import (
    AdaptiveLengthDrafter,
    resolve_config,
)
from hf_spec.methods.registry import make_drafter, parse_strategy
from tests.drafting.cost_model.calls import NAMES, NEW_TOKENS, assistant, generate
from tests.tiny_models import build, draft_model, prompts


class TestNodes:
    """`max_nodes="auto"` with a fixed draft length."""

    @pytest.mark.parametrize(
        ("kind", "policy"),
        [(TreeConfig, "static"), (GsdConfig, "heuristic"), (TreeConfig, "confidence")],
    )
    def test_only_nodes_that_gain_more_than_they_cost_are_sent(
        self, kind: Any, policy: str, costs: Any
    ) -> None:
        drafted, sent = [], []
        for cost in (0.0, 0.3, 3.0):
            costs(cost, 0.01)
            config = kind(max_draft_tokens=3, length_policy=policy)
            stats = generate(config, draft_model("llama")).spec_stats
            sent.append(stats.drafted_tokens / stats.target_forwards)
            drafted.append(stats.draft_forwards / stats.target_forwards)
        assert sent[0] > sent[1] >= sent[2] == 0
        # The policy sets the draft length at any cost. The prompt's round and the last round leave
        # no room for a draft.
        assert min(drafted) > 0.7

    @pytest.mark.parametrize("cost", [0.0, 3.0])
    def test_a_number_is_kept(self, cost: float, costs: Any) -> None:
        costs(cost, 0.5)
        config = TreeConfig(max_draft_tokens=3, max_nodes=7)
        stats = generate(config, draft_model("llama")).spec_stats
        assert stats.drafted_tokens > 5 * (stats.target_forwards - 3)

    @pytest.mark.parametrize("name", ["tree", "gsd", "falcon"])
    def test_greedy_is_plain(self, name: str, costs: Any) -> None:
        costs(0.05, 0.05)
        config = type(parse_strategy(name))(length_policy="static")
        drafter = make_drafter(config, build("llama"), assistant(name))
        assert isinstance(drafter, AdaptiveLengthDrafter)
        plain = build("llama").generate(
            **prompts("llama", "ragged"), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        assert torch.equal(generate(config, assistant(name), "ragged").sequences, plain)

    def test_drafts_at_random_are_sent_as_they_are(self) -> None:
        config = TreeConfig(max_draft_tokens=3, sample_drafts=True)
        drafter = make_drafter(config, build("llama"), draft_model("llama"))
        assert not isinstance(drafter, AdaptiveLengthDrafter)

    def test_nothing_else_is_a_word(self) -> None:
        with pytest.raises(OptionError, match="whole number of at least 1, or 'auto'"):
            TreeConfig(max_nodes="many")


class TestGiven:
    @pytest.mark.parametrize(
        "config",
        [
            DraftConfig(max_draft_tokens=3),
            DraftConfig(length_policy="static"),
            DraftConfig(length_policy="heuristic"),
            TreeConfig(max_draft_tokens=2, max_nodes=None),
            TreeConfig(max_nodes=5),
            GsdConfig(max_draft_tokens=3, max_nodes=5),
            FalconConfig(length_policy="static", max_nodes=None),
            FalconConfig(max_nodes=3),
            FalconConfig(tree="chain"),
            DiscoConfig(max_draft_tokens=4),
            DiscoConfig(acceptance_threshold=0.3),
            LookupConfig(copy_length=7),
            LookupConfig(max_draft_tokens=9),
        ],
    )
    def test_numbers_that_are_given_are_what_is_drafted(self, config: Any) -> None:
        drafter = make_drafter(config, build("llama"), assistant(config.strategy))
        assert not isinstance(drafter, AdaptiveLengthDrafter)

    @pytest.mark.parametrize("name", NAMES)
    def test_without_numbers_times_decide(self, name: str) -> None:
        drafter = make_drafter(parse_strategy(name), build("llama"), assistant(name))
        assert isinstance(drafter, AdaptiveLengthDrafter)

    def test_a_fixed_length_is_kept_at_any_cost(self, costs: Any) -> None:
        costs(9.0, 9.0)
        stats = generate(DraftConfig(max_draft_tokens=3), draft_model("llama")).spec_stats
        assert stats.drafted_tokens > 2 * stats.target_forwards

    @pytest.mark.parametrize("kind", [DraftConfig, TreeConfig, GsdConfig])
    def test_numbers_bound_what_is_measured(self, kind: Any, costs: Any) -> None:
        costs(0.0, 0.0)
        config = kind(max_draft_tokens=2, length_policy="measured")
        stats = generate(config, build("llama")).spec_stats
        assert len(stats.accepted_by_position) == 2

    def test_usual_sizes(self) -> None:
        assert TreeConfig().resolve(measures=False).max_nodes == 15
        heuristic = TreeConfig(length_policy="heuristic").resolve(measures=True)
        assert (heuristic.max_draft_tokens, heuristic.max_nodes) == (5, 24)
        assert TreeConfig(max_nodes=None).resolve(measures=True).max_nodes == 15
        assert GsdConfig(max_nodes=4).resolve(measures=True).max_draft_tokens == 10
        disco = TreeConfig(length_policy="disco", adapter="x").resolve(measures=True)
        assert disco.max_draft_tokens is None
        with pytest.raises(OptionError, match="unknown length_policy"):
            DraftConfig(length_policy="often")

    def test_processes_that_must_keep_step_have_the_usual_sizes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(adaptive_length_drafter, "tensor_parallel_size", lambda _: 2)
        for name in NAMES:
            drafter = make_drafter(parse_strategy(name), build("llama"), assistant(name))
            assert not isinstance(drafter, AdaptiveLengthDrafter)
        with pytest.raises(UnsupportedError, match="differ among the processes"):
            resolve_config(DraftConfig(length_policy="measured"), build("llama"))


@pytest.mark.parametrize("name", ["lookup", "draft", "falcon"])
def test_counters_of_the_drafter(name: str) -> None:
    stats = generate(name, assistant(name)).spec_stats
    assert stats.counters["rounds"] >= stats.counters["idle_rounds"] >= 0
    if name == "draft":
        assert {"draft_nodes", "merges"} <= set(stats.counters)
    assert hf_spec.SpecStats is type(stats)
