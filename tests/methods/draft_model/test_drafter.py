"""Drafting with a second model: shape, cost, acceptance, length, and sampling of drafts."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from hf_spec import DiscoConfig, DraftConfig, GsdConfig, TreeConfig
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.methods.disco.classifier import draft_features
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.methods.feature_pairs.draft_head import DraftHead
from tests.host_and_device import check_same_drafts
from tests.model_watch import count_forwards
from tests.tiny_models import (
    VOCAB,
    build,
    disco_adapter,
    draft_model,
    prompts,
    ragged_batch,
    repetitive_prompt,
)

PROMPT = repetitive_prompt()


def start(inputs: dict[str, Tensor], new_tokens: int = 50, eos: Sequence[int] = ()) -> Any:
    ids = inputs["input_ids"]
    criteria: list[Any] = [MaxLengthCriteria(ids.shape[1] + new_tokens)]
    if eos:
        criteria.append(EosTokenCriteria(list(eos)))
    mask = inputs.get("attention_mask", torch.ones_like(ids))
    return GenerationState.create(ids, mask, StopRules(criteria, ids.shape[0]))


@torch.no_grad()
def draft_once(
    config: DraftConfig, state: GenerationState, model: PreTrainedModel | None = None
) -> tuple[DraftTree, DraftModelDrafter]:
    drafter = DraftModelDrafter(config, model or draft_model("llama"))
    with drafter.active(state):
        return drafter.draft(state, state.draft_limits), drafter


@torch.no_grad()
def next_probs(model: PreTrainedModel, paths: Sequence[Sequence[int]]) -> Tensor:
    """Return (len(paths), V) probabilities of the model after the prompt and each path."""
    rows = [torch.cat([PROMPT[0], torch.tensor(path, dtype=torch.long)]) for path in paths]
    return model(torch.stack(rows)).logits[:, -1].softmax(dim=-1)


def paths(tree: DraftTree, row: int = 0) -> list[tuple[int, ...]]:
    """Return the path of tokens to each node of the row, except the root."""
    known: dict[int, tuple[int, ...]] = {}
    for node in tree.nodes(row):
        above = tree.parent[node]
        known[node] = () if above < 0 else (*known[above], tree.tokens[node])
    return [path for path in known.values() if path]


class TestShape:
    @pytest.mark.parametrize("children", [1, 3])
    @pytest.mark.parametrize("expanded", [1, 4])
    def test_bounds(self, children: int, expanded: int) -> None:
        for max_nodes, depth in itertools.product((2, 15, 100), (1, 4)):
            self.check_bounds(children, expanded, max_nodes, depth)

    def check_bounds(self, children: int, expanded: int, max_nodes: int, depth: int) -> None:
        config = TreeConfig(
            max_draft_tokens=depth,
            children=children,
            expanded_per_level=expanded,
            max_nodes=max_nodes,
        )
        tree = draft_once(config, start({"input_ids": PROMPT}))[0]
        assert max(map(len, tree.children)) <= children
        for level in range(depth):
            inner = [n for n in tree.nodes(0) if tree.depth[n] == level and tree.children[n]]
            assert len(inner) <= expanded
        assert tree.height(0) <= depth
        grown = sum(children * min(expanded, children**level) for level in range(depth))
        assert len(tree.tokens) - 1 == min(max_nodes, grown)

    @pytest.mark.parametrize("depth", [1, 5])
    def test_draft_is_the_greedy_chain(self, depth: int) -> None:
        tree, drafter = draft_once(
            DraftConfig(max_draft_tokens=depth), start({"input_ids": PROMPT})
        )
        model = draft_model("llama")
        greedy = model.generate(PROMPT, max_new_tokens=depth, do_sample=False)
        assert tree.tokens == greedy[0, PROMPT.shape[1] - 1 :].tolist()
        assert tree.parent == list(range(-1, depth))
        assert tree.draft_probs is None
        assert drafter.forwards == depth

    def test_nodes_are_the_most_probable_of_all_paths(self) -> None:
        model = draft_model("llama")
        config = TreeConfig(
            max_draft_tokens=2, children=VOCAB, expanded_per_level=VOCAB, max_nodes=20
        )
        tree, _ = draft_once(config, start({"input_ids": PROMPT}))
        first = next_probs(model, [()])[0]
        second = first[:, None] * next_probs(model, [(token,) for token in range(VOCAB)])
        every = {(a,): first[a].item() for a in range(VOCAB)}
        every |= {(a, b): second[a, b].item() for a in range(VOCAB) for b in range(VOCAB)}
        best = sorted(every, key=lambda path: -every[path])[:20]
        assert paths(tree) == best
        assert {len(path) for path in best} == {1, 2}

    def test_the_likeliest_paths_are_expanded(self) -> None:
        model = draft_model("llama")
        config = TreeConfig(max_draft_tokens=2, children=5, expanded_per_level=2, max_nodes=100)
        tree, _ = draft_once(config, start({"input_ids": PROMPT}))
        top = next_probs(model, [()])[0].topk(5).indices.tolist()
        assert [path[0] for path in paths(tree) if len(path) == 1] == top
        assert {path[0] for path in paths(tree) if len(path) == 2} == set(top[:2])

    def test_improbable_nodes_are_leaves(self) -> None:
        model = draft_model("llama")
        options: dict[str, Any] = {"max_draft_tokens": 4, "max_nodes": 200}
        whole, _ = draft_once(TreeConfig(**options), start({"input_ids": PROMPT}))
        tree, _ = draft_once(
            TreeConfig(**options, min_probability=0.2), start({"input_ids": PROMPT})
        )
        found = paths(tree)
        inner = {path[:-1] for path in found if len(path) > 1}
        chance = {path: next_probs(model, [path[:-1]])[0, path[-1]].item() for path in found}
        assert inner
        assert min(chance[path] for path in inner) >= 0.2
        assert min(chance.values()) < 0.2
        assert tree.num_nodes < whole.num_nodes

    def test_children_far_behind_their_best_sibling_are_dropped(self) -> None:
        model = draft_model("llama")
        config = TreeConfig(max_draft_tokens=3, max_nodes=200, min_sibling_ratio=0.5)
        tree, _ = draft_once(config, start({"input_ids": PROMPT}))
        found = set(paths(tree))
        dropped = 0
        for above in {path[:-1] for path in found}:
            probs, tokens = next_probs(model, [above])[0].topk(3)
            for chance, token in zip(probs.tolist(), tokens.tolist(), strict=True):
                assert ((*above, token) in found) == (chance >= 0.5 * probs[0].item())
                dropped += (*above, token) not in found
        assert dropped > 0

    def test_nothing_grows_behind_an_end_of_sequence(self) -> None:
        config = TreeConfig(max_draft_tokens=3, max_nodes=100)
        free, _ = draft_once(config, start({"input_ids": PROMPT}))
        end = free.tokens[1]
        tree, _ = draft_once(config, start({"input_ids": PROMPT}, eos=[end]))
        assert end in tree.tokens
        assert all(end not in path[:-1] for path in paths(tree))
        assert any(end in path[:-1] for path in paths(free))

    @pytest.mark.parametrize("new_tokens", [1, 2, 4])
    def test_nothing_is_drafted_beyond_the_maximum_length(self, new_tokens: int) -> None:
        for config in (DraftConfig(), TreeConfig()):
            state = start({"input_ids": PROMPT}, new_tokens=new_tokens)
            tree, drafter = draft_once(config, state)
            assert tree.height(0) == drafter.forwards == new_tokens - 1


class TestCost:
    @pytest.mark.parametrize("config", [DraftConfig(max_draft_tokens=4), TreeConfig(max_nodes=99)])
    def test_one_forward_per_level_over_all_rows(self, config: DraftConfig) -> None:
        tree, drafter = draft_once(config, start(ragged_batch()))
        levels = max(tree.height(row) for row in range(5))
        assert drafter.forwards == levels == drafter.config.max_draft_tokens

    def test_forwards_are_reported(self) -> None:
        model, small = build("llama"), draft_model("llama")
        with count_forwards(small) as calls:
            output = model.generate(
                PROMPT,
                max_new_tokens=20,
                do_sample=False,
                spec_strategy="tree",
                assistant=small,
                return_dict_in_generate=True,
            )
        assert output.spec_stats.draft_forwards == len(calls) > 0

    @pytest.mark.parametrize("drafts_itself", [True, False])
    def test_no_token_is_seen_twice(self, drafts_itself: bool) -> None:
        # The first forward pass of a round runs the root. After a fully accepted draft it also runs
        # the last draft token, which was never expanded. Every other pass runs one token.
        model = build("llama")
        small = copy.deepcopy(model) if drafts_itself else draft_model("llama")
        levels = 3
        with count_tokens(small) as seen, watch_rounds() as rounds:
            model.generate(
                PROMPT,
                max_new_tokens=30,
                do_sample=False,
                spec_strategy=DraftConfig(max_draft_tokens=levels),
                assistant=small,
            )
        expected, pending = [], PROMPT.shape[1] - 1
        for [(height, accepted)] in rounds:
            expected += [1 + pending, *[1] * (height - 1)] if height else []
            pending = int(accepted == height)
        assert seen == expected
        if drafts_itself:
            assert max(seen[1:]) == 2

    def test_a_tree_runs_every_expanded_node_once(self) -> None:
        model, small = build("llama"), draft_model("llama")
        config = TreeConfig(max_draft_tokens=3, expanded_per_level=2)
        with count_tokens(small) as seen, watch_rounds() as rounds:
            model.generate(
                PROMPT, max_new_tokens=30, do_sample=False, spec_strategy=config, assistant=small
            )
        expected, pending = [], PROMPT.shape[1] - 1
        for [(height, accepted)] in rounds:
            expected += [1 + pending, *[2] * (height - 1)] if height else []
            pending = int(accepted == height)
        # An accepted node that was sent but not expanded runs in the next round: at most one per
        # round, as in a chain.
        assert len(seen) == len(expected)
        assert seen[0] == expected[0]
        assert max(seen[1:]) <= 2


class TestCounters:
    @pytest.mark.parametrize(
        "config", [DraftConfig(max_draft_tokens=5), TreeConfig(max_nodes=1000)]
    )
    def test_without_merging_every_node_drafted_is_sent(self, config: DraftConfig) -> None:
        output = build("llama").generate(
            **prompts("llama", "ragged"),
            max_new_tokens=16,
            do_sample=False,
            spec_strategy=config,
            assistant=draft_model("llama"),
            return_dict_in_generate=True,
        )
        stats = output.spec_stats
        assert stats.counters == {
            "draft_nodes": stats.drafted_tokens,
            "merges": 0,
            "rounds": sum(row.target_forwards for row in stats.rows),
            "rounds_with_merged_accepted": 0,
        }
        assert stats.drafted_tokens > 0

    def test_nodes_that_are_not_sent_count_as_drafted(self) -> None:
        config = TreeConfig(max_draft_tokens=2, children=3, expanded_per_level=3, max_nodes=5)
        tree, drafter = draft_once(config, start({"input_ids": PROMPT}))
        assert tree.num_nodes == 1 + 5
        assert drafter.counters["draft_nodes"] == 3 + 9


class TestAcceptance:
    @pytest.mark.parametrize(("name", "levels"), [("llama", 1), ("gemma3", 5), ("bloom", 5)])
    def test_the_target_as_its_own_draft_accepts_everything(self, name: str, levels: int) -> None:
        model = build(name)
        output = model.generate(
            **prompts(name, "ragged"),
            max_new_tokens=4 * (levels + 1),
            do_sample=False,
            spec_strategy=DraftConfig(max_draft_tokens=levels),
            assistant=copy.deepcopy(model),
            return_dict_in_generate=True,
        )
        stats = output.spec_stats
        assert stats.tau == levels
        assert stats.target_forwards == 4
        assert stats.accepted_by_position == stats.drafted_by_position == [20] * levels

    def test_the_last_round_drafts_what_there_is_room_for(self) -> None:
        model = build("llama")
        output = model.generate(
            PROMPT,
            max_new_tokens=9,
            do_sample=False,
            spec_strategy=DraftConfig(max_draft_tokens=5),
            assistant=copy.deepcopy(model),
            return_dict_in_generate=True,
        )
        assert output.spec_stats.accepted_by_position == [2, 2, 1, 1, 1]

    @pytest.mark.parametrize("config", [DraftConfig(), TreeConfig()])
    def test_a_batch_drafts_for_each_row_as_if_it_were_alone(self, config: DraftConfig) -> None:
        batch = ragged_batch()
        together, _ = draft_once(config, start(batch))
        for row, (ids, mask) in enumerate(zip(*batch.values(), strict=True)):
            alone, _ = draft_once(config, start({"input_ids": ids[mask.bool()][None]}))
            assert paths(together, row) == paths(alone)

    def test_finished_rows_have_no_nodes(self) -> None:
        state = start(ragged_batch())
        state.finished[1] = state.finished[4] = True
        tree = draft_once(TreeConfig(), state)[0]
        assert [len(tree.nodes(row)) > 0 for row in range(5)] == [True, False, True, True, False]


@pytest.mark.parametrize("config", [DraftConfig(), TreeConfig(max_nodes=15)])
def test_drafts_that_nobody_watches(config: DraftConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(config, length_policy="static")

    def run() -> None:
        build("llama").generate(
            **ragged_batch(),
            max_new_tokens=12,
            spec_strategy=config,
            assistant=draft_model("llama"),
            eos_token_id=[3, 5],
        )

    check_same_drafts(monkeypatch, DraftModelDrafter, run)


class TestPolicies:
    def test_confidence_stops_each_row_behind_an_unlikely_token(self) -> None:
        batch, threshold = ragged_batch(), 0.2
        config = DraftConfig(
            max_draft_tokens=6, length_policy="confidence", confidence_threshold=threshold
        )
        tree = draft_once(config, start(batch))[0]
        small, heights = draft_model("llama"), []
        for ids, mask in zip(*batch.values(), strict=True):
            sequence, height = ids[mask.bool()][None], 0
            while height < 6:
                with torch.no_grad():
                    probs = small(sequence).logits[0, -1].softmax(dim=-1)
                sequence = torch.cat([sequence, probs.argmax()[None, None]], dim=1)
                height += 1
                if probs.max() < threshold:
                    break
            heights.append(height)
        assert [tree.height(row) for row in range(5)] == heights
        assert len(set(heights)) > 1

    @pytest.mark.parametrize(("threshold", "height"), [(0.0, 6), (1.0, 1)])
    def test_confidence_at_its_limits(self, threshold: float, height: int) -> None:
        config = TreeConfig(
            max_draft_tokens=6,
            max_nodes=200,
            length_policy="confidence",
            confidence_threshold=threshold,
        )
        assert draft_once(config, start({"input_ids": PROMPT}))[0].height(0) == height

    @pytest.mark.parametrize("kind", [DraftConfig, TreeConfig])
    def test_heuristic_follows_each_row(self, kind: type[DraftConfig]) -> None:
        model, new_tokens = build("llama"), 30
        inputs = prompts("llama", "ragged")
        options: dict[str, Any] = {"max_draft_tokens": 3, "length_policy": "heuristic"}
        if kind is TreeConfig:
            options["max_nodes"] = 1000
        with watch_rounds() as rounds:
            model.generate(
                **inputs,
                max_new_tokens=new_tokens,
                do_sample=False,
                spec_strategy=kind(**options),
                assistant=draft_model("llama"),
            )
        limits, room = [3] * 5, [new_tokens] * 5
        for current in rounds:
            for row, (height, accepted) in enumerate(current):
                if not room[row]:
                    assert (height, accepted) == (0, 0)
                    continue
                assert height == min(limits[row], room[row] - 1)
                room[row] -= accepted + 1
                if height:
                    limits[row] = max(1, limits[row] + (2 if accepted == height else -1))
        assert len(set(limits)) > 1

    @pytest.mark.parametrize("kind", [DraftConfig, TreeConfig])
    def test_heuristic_grows_beyond_the_start(self, kind: type[DraftConfig]) -> None:
        model = build("llama")
        with watch_rounds() as rounds:
            model.generate(
                PROMPT,
                max_new_tokens=30,
                do_sample=False,
                spec_strategy=kind(max_draft_tokens=2, length_policy="heuristic"),
                assistant=copy.deepcopy(model),
            )
        if kind is DraftConfig:
            assert rounds == [[(2, 2)], [(4, 4)], [(6, 6)], [(8, 8)], [(5, 5)]]
        assert rounds[1][0][0] > 2


class TestSampling:
    @torch.no_grad()
    def sampled(self, config: DraftConfig) -> DraftTree:
        state = start({"input_ids": PROMPT})
        state.do_sample = True
        torch.manual_seed(3)
        return draft_once(config, state)[0]

    @pytest.mark.parametrize(
        "config",
        [DraftConfig(max_draft_tokens=3), TreeConfig(max_draft_tokens=3, sample_drafts=True)],
    )
    def test_nodes_carry_what_their_children_were_drawn_from(self, config: DraftConfig) -> None:
        tree = self.sampled(config)
        probs = tree.draft_probs
        assert probs is not None
        assert probs.shape == (tree.num_nodes, VOCAB)
        assert len(tree.tokens) - 1 <= config.resolve(measures=False).shape.max_nodes
        for node, path in enumerate([(), *paths(tree)]):
            if tree.children[node]:
                expected = next_probs(draft_model("llama"), [path])[0]
                torch.testing.assert_close(probs[node], expected, atol=1e-5, rtol=1e-4)
                tokens = [tree.tokens[child] for child in tree.children[node]]
                assert len(set(tokens)) == len(tokens) == config.shape.children

    @pytest.mark.parametrize("config", [DraftConfig(sample_drafts=False), TreeConfig()])
    def test_without_sample_drafts_the_top_tokens_are_taken(self, config: DraftConfig) -> None:
        tree = self.sampled(config)
        greedy, _ = draft_once(config, start({"input_ids": PROMPT}))
        assert tree.draft_probs is None
        assert tree.tokens == greedy.tokens


@contextmanager
def count_tokens(model: PreTrainedModel) -> Iterator[list[int]]:
    """Yield a list to which every forward pass appends its number of tokens."""
    seen: list[int] = []
    handle = model.register_forward_pre_hook(
        lambda _, __, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield seen
    finally:
        handle.remove()


@contextmanager
def watch_rounds() -> Iterator[list[list[tuple[int, int]]]]:
    """Yield a list to which every round appends each row's (levels drafted, tokens accepted)."""
    rounds: list[list[tuple[int, int]]] = []
    observe = DraftModelDrafter.observe

    def watched(self: DraftModelDrafter, verdict: Any, output: Any) -> None:
        tree = verdict.tree
        rounds.append([(tree.height(r), len(path)) for r, path in enumerate(verdict.accepted)])
        observe(self, verdict, output)

    DraftModelDrafter.observe = watched  # type: ignore[method-assign]
    try:
        yield rounds
    finally:
        DraftModelDrafter.observe = observe  # type: ignore[method-assign]


class TestOwnTokens:
    """Draft models with some of the tokens: probabilities are not computed for the others."""

    KNOWN = torch.arange(3, VOCAB, 4)

    @pytest.fixture
    def draft(self) -> PreTrainedModel:
        model = copy.deepcopy(draft_model("llama"))
        model.set_output_embeddings(DraftHead(model.get_output_embeddings(), self.KNOWN))
        return model

    @pytest.fixture
    def widths(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Record the number of tokens in each distribution."""
        seen: list[int] = []
        probabilities = DraftModelDrafter.probabilities

        def watch(*given: Any) -> Tensor:
            probs = probabilities(*given)
            seen.append(probs.shape[-1])
            return probs

        monkeypatch.setattr(DraftModelDrafter, "probabilities", watch)
        return seen

    @pytest.mark.parametrize("config", [DraftConfig(), TreeConfig(), GsdConfig(merge_length=0)])
    def test_the_draft_is_that_among_all_tokens(
        self,
        config: DraftConfig,
        draft: PreTrainedModel,
        widths: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        config = replace(config, max_draft_tokens=3)
        few = draft_once(config, start(ragged_batch()), draft)[0]
        assert set(widths) == {len(self.KNOWN)}
        monkeypatch.setattr(DraftModelDrafter, "_translates", True)
        widths.clear()
        among_all = draft_once(config, start(ragged_batch()), draft)[0]
        assert set(widths) == {VOCAB}
        assert few.tokens == among_all.tokens
        assert few.parent == among_all.parent
        assert {*few.tokens[1:]} - {few.tokens[n] for n in few.row_start[:-1]} <= {
            *self.KNOWN.tolist()
        }
        # Sums over fewer numbers are rounded differently; nothing else differs.
        assert few.node_probs == pytest.approx(among_all.node_probs, rel=1e-6)

    def test_what_a_classifier_sees_is_the_same(self, draft: PreTrainedModel) -> None:
        logits = draft(PROMPT).logits[0].float()
        positions = torch.arange(len(logits))
        among_all = draft_features(logits.softmax(dim=-1), positions)
        few = draft_features(logits[:, self.KNOWN].softmax(dim=-1), positions)
        torch.testing.assert_close(few, among_all, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize(
        "options",
        [
            {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9},
            {"repetition_penalty": 1.3},
            {"do_sample": True, "top_p": 0.9, "repetition_penalty": 1.3},
        ],
        ids="-".join,
    )
    @pytest.mark.parametrize("config", [DraftConfig(), TreeConfig(), GsdConfig(merge_length=0)])
    def test_neither_sampling_nor_processors_change_that(
        self,
        config: DraftConfig,
        options: dict[str, Any],
        draft: PreTrainedModel,
        widths: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """All drafts, or the distribution of the first drawn one, equal those among all tokens."""
        found: list[DraftTree] = []
        drafted = DraftModelDrafter.draft

        def kept(self: DraftModelDrafter, state: Any, limits: Any) -> DraftTree:
            found.append(drafted(self, state, limits))
            return found[-1]

        monkeypatch.setattr(DraftModelDrafter, "draft", kept)

        def trees() -> list[DraftTree]:
            found.clear()
            torch.manual_seed(1)
            given: dict[str, Any] = {"spec_strategy": replace(config, max_draft_tokens=2)}
            build("llama").generate(PROMPT, max_new_tokens=6, assistant=draft, **given, **options)
            return list(found)

        few = trees()
        assert set(widths) == {len(self.KNOWN)}
        monkeypatch.setattr(DraftModelDrafter, "_translates", True)
        widths.clear()
        among_all = trees()
        assert set(widths) == {VOCAB}
        if few[0].draft_probs is not None:
            assert few[0].draft_probs.shape[-1] == VOCAB
            torch.testing.assert_close(few[0].draft_probs[0], among_all[0].draft_probs[0])
            return
        for one, other in zip(few, among_all, strict=True):
            assert (one.tokens, one.parent) == (other.tokens, other.parent)
            assert one.node_probs == pytest.approx(other.node_probs, rel=1e-5)

    def test_greedy_is_identical(self, draft: PreTrainedModel, widths: list[int]) -> None:
        model = build("llama")
        options: dict[str, Any] = {**ragged_batch(), "max_new_tokens": 12, "do_sample": False}
        expected = model.generate(**options)
        got = model.generate(
            **options, spec_strategy=TreeConfig(max_draft_tokens=3), assistant=draft
        )
        assert torch.equal(got, expected)
        assert set(widths) == {len(self.KNOWN)}


def cut(positions: int = 24) -> PreTrainedModel:
    """Return the first layers of GPT-2 with a table of few positions."""
    model: Any = copy.deepcopy(draft_model("gpt2"))
    table = model.transformer.wpe
    table.weight = torch.nn.Parameter(table.weight[:positions].clone())
    model.config.max_position_embeddings = table.num_embeddings = positions
    return model


class TestPositions:
    """The root of n tokens has position n - 1, and the last level of a draft does not run."""

    @pytest.mark.parametrize(("length", "depth"), [(19, 5), (21, 4), (24, 1), (25, 0), (30, 0)])
    @pytest.mark.parametrize("config", [DraftConfig, TreeConfig])
    def test_a_draft_ends_at_the_last_position(
        self, config: type[DraftConfig], length: int, depth: int
    ) -> None:
        state = start({"input_ids": repetitive_prompt(length)})
        options = {} if config is DraftConfig else {"max_nodes": 200}
        tree, drafter = draft_once(config(max_draft_tokens=5, **options), state, cut())
        assert tree.height(0) == drafter.forwards == depth

    def test_rows_past_it_are_not_run(self) -> None:
        state = start(ragged_batch((26, 12, 24)))
        tree, drafter = draft_once(DraftConfig(max_draft_tokens=3), state, cut())
        assert [tree.height(row) for row in range(3)] == [0, 3, 1]
        assert drafter._runner.tokens_run == 12 + 2 + 24
        assert drafter._runner.rows.stored == [0, 11, 23]

    def test_rotary_positions_do_not_end(self) -> None:
        model = copy.deepcopy(draft_model("llama"))
        model.config.max_position_embeddings = 8
        state = start({"input_ids": PROMPT})
        tree, _ = draft_once(DraftConfig(max_draft_tokens=4), state, model)
        assert tree.height(0) == 4

    @pytest.mark.parametrize("strategy", ["draft", "tree", "gsd", "disco"])
    def test_a_generation_goes_on_past_it(self, strategy: str) -> None:
        model: Any = build("gpt2")
        chosen: Any = strategy
        if strategy == "disco":
            chosen = DiscoConfig(adapter=disco_adapter("gpt2"))
        options = {**ragged_batch(), "max_new_tokens": 40, "do_sample": False}
        plain = model.generate(**options)
        for _ in range(2):
            output = model.generate(
                **options, spec_strategy=chosen, assistant=cut(), return_dict_in_generate=True
            )
            assert torch.equal(output.sequences, plain)
            assert output.spec_stats.draft_forwards > 0
