"""Graph drafting end to end: the output is exact; merged nodes are verified and accepted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import MaxLengthCriteria

import hf_spec
from hf_spec.drafting.lossy_rules import IndependentAcceptance
from hf_spec.drafting.token_graph import TokenGraph, UnmergedTree
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.verifiers import NodeDraw
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from tests.tiny_models import build, draft_model, prompts, ragged_batch, repetitive_prompt

WIDE = {
    "min_probability": 0.0,
    "min_sibling_ratio": 0.0,
    "max_nodes": 60,
    "expanded_per_level": 12,
    "max_draft_tokens": 5,
}


@pytest.mark.parametrize(
    ("name", "merge_length"),
    [("llama", None), ("llama", 0), ("llama", 3), ("gemma3", 1), ("bloom", 2)],
)
def test_greedy_is_identical(name: str, merge_length: int | None) -> None:
    model = build(name)
    config = hf_spec.GsdConfig(merge_length=merge_length, **WIDE)
    draft = hf_spec.truncated_draft(model, 2)
    for inputs in ({"input_ids": repetitive_prompt()}, ragged_batch()):
        options = {**inputs, "max_new_tokens": 20, "do_sample": False}
        expected = model.generate(**options)
        got = model.generate(**options, spec_strategy=config, assistant=draft)
        assert torch.equal(got, expected)


def test_a_path_through_a_merge_edge_is_accepted_and_repaired(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The target is its own draft model, so every true continuation is in the graph. Tokens of such
    # a small vocabulary repeat, so some accepted paths take merge edges.
    model = build("llama")
    seen = {"accepted": 0, "dropped": 0}
    observe = DraftModelDrafter.observe

    def watch(self: DraftModelDrafter, verdict: Any, output: Any) -> None:
        for row, sent in self._sent.items():
            path = verdict.paths[row]
            flags = [sent.merged[node] for node in path]
            seen["accepted"] += any(flags)
            observe(self, verdict, output)
            assert self._runner is not None
            committed = len(self._runner_state.tokens[row])
            if any(flags):
                after = len(path) - flags.index(True)
                seen["dropped"] += committed - 1 - self._runner.rows.stored[row] >= after

    drafting = DraftModelDrafter.draft

    def remember(self: DraftModelDrafter, state: Any, limits: Any) -> Any:
        self._runner_state = state  # type: ignore[attr-defined]
        return drafting(self, state, limits)

    monkeypatch.setattr(DraftModelDrafter, "observe", watch)
    monkeypatch.setattr(DraftModelDrafter, "draft", remember)
    config = hf_spec.GsdConfig(merge_length=0, children=6, **WIDE)
    options = {"input_ids": repetitive_prompt(), "max_new_tokens": 60, "do_sample": False}
    expected = model.generate(**options)
    output = model.generate(
        **options, spec_strategy=config, assistant=model, return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, expected)
    assert seen["accepted"] > 0
    assert seen["dropped"] == seen["accepted"]
    assert output.spec_stats.counters["rounds_with_merged_accepted"] == seen["accepted"]


def test_merging_drafts_fewer_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    draft = hf_spec.truncated_draft(model, 2)
    sizes: list[int] = []
    unmerge = TokenGraph.unmerge

    def weigh(self: TokenGraph, max_nodes: int, max_depth: int) -> UnmergedTree:
        sizes.append(len(self))
        return unmerge(self, max_nodes, max_depth)

    monkeypatch.setattr(TokenGraph, "unmerge", weigh)
    drafted, sequences = [], []
    for merge_length in (None, 0):
        sizes.clear()
        config = hf_spec.GsdConfig(merge_length=merge_length, children=6, **WIDE)
        output = model.generate(
            repetitive_prompt(),
            max_new_tokens=20,
            do_sample=False,
            spec_strategy=config,
            assistant=draft,
            return_dict_in_generate=True,
        )
        sequences.append(output.sequences)
        drafted.append(sum(sizes) / len(sizes))
    assert torch.equal(*sequences)
    assert drafted[1] < drafted[0]


@pytest.mark.parametrize(
    "options",
    [{"sample_drafts": True}, {"merge_length": -1}, {"max_draft_nodes": 0}, {"lossy": 1}],
)
def test_refused_options(options: dict[str, Any]) -> None:
    with pytest.raises(hf_spec.OptionError, match=next(iter(options))):
        hf_spec.GsdConfig(**options)


@pytest.mark.parametrize(
    ("name", "policy"), [("llama", "static"), ("gemma3", "heuristic"), ("bloom", "confidence")]
)
def test_the_lossy_rule_leaves_greedy_output_alone(name: str, policy: str) -> None:
    model = build(name)
    config = hf_spec.GsdConfig(
        **{**WIDE, "max_draft_tokens": 3, "merge_length": 0},
        length_policy=policy,
        lossy=True,
        **({"confidence_threshold": 0.15} if policy == "confidence" else {}),
    )
    options = {**prompts(name, "ragged"), "max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**options)
    output = model.generate(
        **options, spec_strategy=config, assistant=draft_model(name), return_dict_in_generate=True
    )
    assert torch.equal(output.sequences, expected)
    assert output.spec_stats.accepted_tokens > 0
    assert output.spec_stats.counters["merges"] > 0


def start(new_tokens: int = 50, **options: Any) -> GenerationState:
    prompt = repetitive_prompt()
    stop = StopRules([MaxLengthCriteria(prompt.shape[1] + new_tokens)], 1)
    return GenerationState.create(prompt, torch.ones_like(prompt), stop, **options)


@torch.no_grad()
def draft_once(
    config: hf_spec.GsdConfig, state: GenerationState
) -> tuple[DraftTree, DraftModelDrafter]:
    drafter = DraftModelDrafter(config, draft_model("llama"))
    with drafter.active(state):
        return drafter.draft(state, state.draft_limits), drafter


@dataclass(repr=False, eq=False)
class Drafted:
    """Node of the graph as the paper describes it, with the tokens that lead to it."""

    path: tuple[int, ...]
    parent: Drafted | None = None
    leaf: bool = False
    targets: tuple[Drafted, ...] = ()

    def reachable(self) -> set[Drafted]:
        found, todo = {self}, [self]
        while todo:
            fresh = set(todo.pop().targets) - found
            found |= fresh
            todo.extend(fresh)
        return found


@torch.no_grad()
def drafted_by_hand(
    model: PreTrainedModel, config: hf_spec.GsdConfig
) -> tuple[list[Drafted], int, int]:
    """Return the nodes below the root, and the numbers of merges and of expanded nodes.

    Each expanded node takes its own forward pass.
    """
    prompt = repetitive_prompt()[0].tolist()
    root = Drafted(())
    nodes, merges, expanded, level = [], 0, 0, [root]
    tried: set[Drafted] = set()
    for _ in range(config.max_draft_tokens):
        below: list[Drafted] = []
        tried.update(level)
        for parent in level:
            expanded += 1
            logits = model(torch.tensor([[*prompt, *parent.path]])).logits[0, -1]
            chances, tokens = logits.softmax(dim=-1).topk(config.children)
            for chance, token in zip(chances.tolist(), tokens.tolist(), strict=True):
                if chance < config.min_sibling_ratio * float(chances[0]):
                    continue
                new = Drafted((*parent.path, token), parent, chance < config.min_probability)
                first = None
                if config.merge_length is not None:
                    run = [*prompt, *new.path][-config.merge_length - 1 :]
                    first = next(
                        (
                            node
                            for node in nodes
                            if [*prompt, *node.path][-config.merge_length - 1 :] == run
                            and parent not in node.reachable()
                        ),
                        None,
                    )
                merges += first is not None
                # A leaf can be expanded once a probable token is merged into it.
                if first is not None and not new.leaf and first not in tried:
                    first.leaf = False
                    below.append(first)
                parent.targets = (*parent.targets, first or new)
                if first is None:
                    nodes.append(new)
                    below.append(new)
        level = [node for node in nodes if node in below and not node.leaf]
    return nodes, merges, expanded


class TestGraph:
    """Drafts equal a direct implementation of the paper, with one forward pass per node."""

    @pytest.mark.parametrize("merge_length", [None, 0, 2])
    @pytest.mark.parametrize(("probability", "ratio"), [(0.0, 0.0), (0.1, 0.0), (0.05, 0.4)])
    def test_counts(self, merge_length: int | None, probability: float, ratio: float) -> None:
        config = hf_spec.GsdConfig(
            max_draft_tokens=4,
            merge_length=merge_length,
            min_probability=probability,
            min_sibling_ratio=ratio,
            max_nodes=10_000,
            max_draft_nodes=10_000,
        )
        nodes, merges, expanded = drafted_by_hand(draft_model("llama"), config)
        tree, drafter = draft_once(config, start())
        assert drafter.counters == {
            "draft_nodes": len(nodes),
            "merges": merges,
            "rounds": 1,
            "rounds_with_merged_accepted": 0,
        }
        # The draft model ran every inner node once, and no leaf.
        assert drafter._runner is not None
        assert drafter._runner.tokens_run == repetitive_prompt().shape[1] - 1 + expanded
        sent = {tuple(path) for path in spelled(tree)}
        assert sent >= {node.path for node in nodes}
        if merge_length is None:
            assert len(sent) == len(nodes)
        elif merges and any(node.leaf for node in nodes) is False:
            assert len(sent) > len(nodes)

    def test_node_probs_are_those_of_the_draft_model(self) -> None:
        config = hf_spec.GsdConfig(**WIDE, merge_length=None)
        tree, _ = draft_once(config, start())
        assert tree.node_probs is not None
        assert tree.node_probs[0] == 1
        prompt = repetitive_prompt()[0].tolist()
        with torch.no_grad():
            for node, path in enumerate(spelled(tree), start=1):
                logits = draft_model("llama")(torch.tensor([[*prompt, *path[:-1]]])).logits
                expected = logits[0, -1].softmax(dim=-1)[path[-1]]
                torch.testing.assert_close(
                    torch.tensor(tree.node_probs[node]), expected, atol=1e-5, rtol=1e-4
                )

    @pytest.mark.parametrize("bound", [1, 3, 30, 31, 100])
    def test_no_more_nodes_than_allowed(self, bound: int) -> None:
        config = hf_spec.GsdConfig(
            **{**WIDE, "max_draft_tokens": 4, "expanded_per_level": 256},
            merge_length=2,
            max_draft_nodes=bound,
        )
        free, _, _ = drafted_by_hand(draft_model("llama"), config)
        tree, drafter = draft_once(config, start())
        assert drafter.counters["draft_nodes"] == min(bound, len(free))
        # Four children per node: level 1 reaches bounds 1 and 3, level 3 bounds 30 and 31.
        assert drafter.forwards == {1: 1, 3: 1, 30: 3, 31: 3, 100: 4}[bound]
        assert tree.num_nodes > 1

    def test_drafting_ends_when_a_level_has_only_leaves(self) -> None:
        config = hf_spec.GsdConfig(min_probability=1.0)
        tree, drafter = draft_once(config, start())
        assert tree.height(0) == drafter.forwards == 1

    def test_no_level_below_the_last(self) -> None:
        for merge_length in (None, 0):
            config = hf_spec.GsdConfig(**{**WIDE, "max_draft_tokens": 2}, merge_length=merge_length)
            tree, drafter = draft_once(config, start())
            assert drafter.forwards == 2
            assert tree.height(0) == 2 or merge_length is not None

    def test_every_node_of_a_level_is_expanded_by_default(self) -> None:
        config = hf_spec.GsdConfig(
            max_draft_tokens=3,
            min_probability=0.0,
            min_sibling_ratio=0.0,
            merge_length=None,
            max_nodes=1000,
        )
        tree, _ = draft_once(config, start())
        assert tree.num_nodes - 1 == 4 + 16 + 64

    def test_a_path_counts_as_merged_by_the_edges_it_takes(self) -> None:
        config = hf_spec.GsdConfig(**{**WIDE, "max_draft_tokens": 3}, merge_length=0)
        for below_merge in (False, True):
            tree, drafter = draft_once(config, start())
            flags = drafter._sent[0].merged
            paths = [path_to(tree, node) for node in range(1, tree.num_nodes)]
            path = next(p for p in paths if any(flags[node] for node in p) == below_merge)
            drafter.observe(Verdict(tree, [path], [0]), ForwardOutput(torch.empty(0)))
            assert drafter.counters["rounds_with_merged_accepted"] == below_merge


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Return the nodes from the root's child down to `node`."""
    path: list[int] = []
    while node > 0:
        path.insert(0, node)
        node = tree.parent[node]
    return path


def spelled(tree: DraftTree) -> list[list[int]]:
    """Return, for each node below the root of row 0, the tokens that lead to it."""
    nodes = range(1, len(tree.nodes(0)))
    return [[tree.tokens[n] for n in path_to(tree, node)] for node in nodes]


class TestLossyRule:
    def test_scores_have_one_entry_per_token(self) -> None:
        output = build("llama").generate(
            **prompts("llama", "ragged"),
            max_new_tokens=12,
            do_sample=True,
            temperature=0.4,
            repetition_penalty=1.2,
            spec_strategy=hf_spec.GsdConfig(**WIDE, merge_length=0, lossy=True),
            assistant=draft_model("llama"),
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        assert len(output.scores) == len(output.logits) == 12
        assert output.spec_stats.accepted_tokens > 0

    def test_the_rule_is_taken_only_when_it_was_asked_for_and_the_target_samples(self) -> None:
        for lossy in (False, True):
            for do_sample in (False, True):
                state = start(do_sample=do_sample)
                drafter = DraftModelDrafter(hf_spec.GsdConfig(lossy=lossy), draft_model("llama"))
                with drafter.active(state):
                    rule = type(drafter.make_verifier([], 1))
                assert rule is (IndependentAcceptance if lossy and do_sample else NodeDraw)

    def test_a_processor_that_may_remember_is_refused(self) -> None:
        def unchanged(input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores

        options: dict[str, Any] = {
            "max_new_tokens": 4,
            "logits_processor": [unchanged],
            "spec_strategy": hf_spec.GsdConfig(lossy=True),
            "assistant": draft_model("llama"),
        }
        model = build("llama")
        with pytest.raises(hf_spec.UnsupportedError, match="function might remember"):
            model.generate(repetitive_prompt(), do_sample=True, **options)
        model.generate(repetitive_prompt(), do_sample=False, **options)
