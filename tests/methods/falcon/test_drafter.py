"""Falcon drafts: equality with a reference without caches, cost, limits, and errors."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

from hf_spec import AssistantError, FalconConfig, OptionError, UnsupportedError
from hf_spec.adapters.folder import save_adapter
from hf_spec.common.compat import CACHE_NAME
from hf_spec.drafting.rank_tree import RankTree, published_trees
from hf_spec.engine import runner as runner_module
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.methods.falcon.drafter import (
    FalconDrafter,
    choose_tree,
    max_depth,
    resolve_falcon_head,
    used_lists,
)
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from tests.drafting.test_rank_tree import RAGGED, random_paths
from tests.falcon_reference import HEADS, block_ends, drafted, features_of, random_head
from tests.host_and_device import check_same_drafts
from tests.model_watch import count_forwards
from tests.published_heads import sample as published
from tests.refusals import refuse, small_llama
from tests.tiny_models import VOCAB, build, prompts, ragged_batch, repetitive_prompt, settled_prompt

PROMPT = repetitive_prompt()
SIZES = [1, 2, 3, 4]
# Rank gaps, ragged leaves, several blocks per pass.
BUSHY = RankTree.of(
    [
        *[(rank,) for rank in range(12)],
        *[(0, 0), (0, 2), (1, 0), (5, 0), (0, 0, 0), (0, 0, 1), (1, 0, 0), (0, 2, 0)],
        *[(0, 0, 0, 0), (0, 0, 1, 0), (1, 0, 0, 3), (1, 0, 0, 0), (0, 2, 0, 1)],
        *[(0, 0, 0, 0, 0), (1, 0, 0, 3, 0), (1, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0)],
    ]
)


@cache
def knowing_head(size: int) -> FalconHead:
    """Return a head trained on the tiny Llama's continuation of its settled prompt."""
    model = build("llama")
    tokens = model.generate(settled_prompt("llama"), max_new_tokens=60, do_sample=False)
    features = features_of(model, tokens[0].tolist())[None]
    torch.manual_seed(0)
    head = FalconHead(model, FalconShape(size, 1, dropout=0.0), None)
    optimizer = torch.optim.AdamW(head.trained().values(), lr=5e-3)
    for step in range(150):
        predicted = head(tokens[:, 1:], features[:, :-1], step % size)
        kept = predicted[0, : -size - 1]
        loss = F.cross_entropy(head.head.draft_logits(kept), tokens[0, 1 + size : -1])
        loss = loss + F.smooth_l1_loss(kept, features[0, size:-2])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.requires_grad_(False).eval()


@contextmanager
def watch_drafts() -> Iterator[list[tuple[DraftTree, list[list[int]], list[int], int]]]:
    """Yield a list of (tree, committed tokens, unfinished rows, passes), one per draft."""
    seen: list[Any] = []
    original = FalconDrafter.draft

    def draft(self: FalconDrafter, state: Any, limits: Any) -> DraftTree:
        before = self.forwards
        tree = original(self, state, limits)
        tokens = [list(row) for row in state.tokens]
        seen.append((tree, tokens, list(state.unfinished), self.forwards - before))
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FalconDrafter, "draft", draft)
        yield seen


def generate(name: str, kind: str, head: Any, new_tokens: int = 16, **options: Any) -> Any:
    return build(name).generate(
        **prompts(name, kind),
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        spec_strategy=FalconConfig(**options),
        assistant=head,
    )


def generate_plainly(name: str, kind: str, new_tokens: int = 16) -> torch.Tensor:
    options = {"max_new_tokens": new_tokens, "do_sample": False}
    return build(name).generate(**prompts(name, kind), **options)


def reaches(tree: DraftTree, row: int) -> dict[tuple[int, ...], float]:
    """Return the path probability of each node below the root of a row, keyed by token path."""
    assert tree.node_probs is not None
    root, *nodes = tree.nodes(row)
    found: dict[int, tuple[tuple[int, ...], float]] = {root: ((), 1.0)}
    for node in nodes:
        path, reach = found[tree.parent[node]]
        found[node] = (*path, tree.tokens[node]), reach * tree.node_probs[node]
    return dict(found[node] for node in nodes)


def check_against_reference(
    name: str, head: FalconHead, seen: list[Any], tree: RankTree, begin: int = 0
) -> int:
    """Compare every draft with the reference; return the number of compared nodes."""
    ends: dict[int, list[int]] = {}
    compared, size = 0, head.shape.block_size
    # Features do not depend on later tokens, so those of the whole text fit every draft of it.
    texts = {row: tokens[row] for _, tokens, unfinished, _ in seen for row in unfinished}
    known = {row: features_of(build(name), text, head) for row, text in texts.items()}
    for draft, tokens, unfinished, _ in seen:
        for row in unfinished:
            root, *nodes = draft.nodes(row)
            assert draft.tokens[root] == tokens[row][-1]
            assert draft.node_probs[root] == 1
            if not nodes:
                continue
            assert tokens[row] == texts[row][: len(tokens[row])]
            features = known[row][begin : len(tokens[row]) - 1]
            ends[row] = block_ends(len(features), size, ends.get(row, []))
            paths = tree.paths[: len(nodes)]
            expected = drafted(head, tokens[row], features, paths, ends[row])
            for node, path, above in zip(nodes, paths, tree.parents, strict=False):
                token, chance = expected[path]
                assert draft.tokens[node] == token
                assert abs(draft.node_probs[node] - chance) < 2e-3
                assert draft.parent[node] == root + above + 1
                compared += 1
    return compared


class TestDrafts:
    @pytest.mark.by_default(size=lambda size: size > 1)
    @pytest.mark.parametrize(("name", "size", "recurrent"), HEADS)
    def test_every_draft_of_a_ragged_batch(self, name: str, size: int, recurrent: bool) -> None:
        head = random_head(name, size, 2, recurrent)
        with watch_drafts() as seen:
            output = generate(name, "ragged", head, tree=BUSHY.paths)
        assert check_against_reference(name, head, seen, BUSHY) > 500
        # Rounds must differ in length to exercise pairs that are fed again.
        assert output.spec_stats.accepted_tokens > 0

    @pytest.mark.by_default(name=("gemma3",))
    @pytest.mark.parametrize(("name", "size"), [("llama", 1), ("gemma3", 2)])
    def test_features_of_several_states(
        self, name: str, size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        head = random_head(name, size, 2, fused=True)
        with watch_drafts() as seen:
            output = generate(name, "ragged", head, tree=BUSHY.paths)
        assert check_against_reference(name, head, seen, BUSHY) > 500
        assert torch.equal(output.sequences, generate_plainly(name, "ragged"))
        # The drafts differ from those that use only the last state.
        monkeypatch.setattr(head, "earlier", None)
        with pytest.raises(AssertionError):
            check_against_reference(name, head, seen, BUSHY)

    @pytest.mark.parametrize("size", [2, 3])
    def test_after_long_accepts(self, size: int) -> None:
        head, tree = knowing_head(size), RankTree.chain(2 * size + 1)
        with watch_drafts() as seen:
            output = generate("llama", "one", head, 40, tree=tree.paths)
        assert check_against_reference("llama", head, seen, tree) > 20
        assert output.spec_stats.tau > 1

    @pytest.mark.parametrize("name", ["qwen2", "gpt_neox", "mistral_sliding", "gpt_oss", "gpt2"])
    def test_other_architectures(self, name: str) -> None:
        head = random_head(name, 2)
        with watch_drafts() as seen:
            generate(name, "ragged", head, 8, tree=BUSHY.paths)
        assert check_against_reference(name, head, seen, BUSHY) > 100

    @pytest.mark.parametrize("seed", range(4))
    def test_random_trees(self, seed: int) -> None:
        head, tree = random_head("llama", seed + 1), RankTree.of(random_paths(seed))
        with watch_drafts() as seen:
            generate("llama", "one", head, 8, tree=tree.paths)
        assert check_against_reference("llama", head, seen, tree) > 50

    @pytest.mark.parametrize("size", SIZES)
    def test_the_root_is_alone_before_there_are_k_pairs(self, size: int) -> None:
        """Start from a one-token prompt, a case that the reference does not cover."""
        with watch_drafts() as seen:
            build("llama").generate(
                PROMPT[:, :1],
                max_new_tokens=10,
                do_sample=False,
                spec_strategy=FalconConfig(tree=[(0,)]),
                assistant=random_head("llama", size),
            )
        for tree, tokens, _, passes in seen[:-1]:
            pairs = len(tokens[0]) - 1 if tree is not seen[0][0] else 0
            assert tree.num_nodes - 1 == passes == int(pairs >= size)

    def test_a_reused_cache_hides_the_features_of_its_tokens(self) -> None:
        model, head = build("llama"), random_head("llama", 2)
        cache, prompt = DynamicCache(config=model.config), settled_prompt("llama")
        with torch.no_grad():
            model(prompt[:, :20], **{CACHE_NAME: cache}, use_cache=True)
        with watch_drafts() as seen:
            output = model.generate(
                prompt,
                **{CACHE_NAME: cache},
                max_new_tokens=12,
                do_sample=False,
                spec_strategy=FalconConfig(tree=BUSHY.paths),
                assistant=head,
            )
        plain = model.generate(prompt, max_new_tokens=12, do_sample=False)
        assert torch.equal(output, plain)
        assert check_against_reference("llama", head, seen, BUSHY, begin=20) > 100

    def test_prompts_run_in_stretches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(runner_module, "PREFILL_CHUNK", 4)
        monkeypatch.setattr(runner_module, "STEP_TOKENS", 4)
        head = random_head("llama", 3)
        with watch_drafts() as seen:
            generate("llama", "ragged", head, 6, tree=BUSHY.paths)
        assert check_against_reference("llama", head, seen, BUSHY) > 100

    def test_ranks_beyond_the_vocabulary_do_not_exist(self) -> None:
        head = FalconHead(build("llama"), FalconShape(2, 1), torch.tensor([5, 6, 7])).eval()
        with watch_drafts() as seen:
            output = generate("llama", "one", head, tree=BUSHY.paths)
        tokens = {t for tree, *_ in seen for t in tree.tokens[1:]}
        assert tokens == {5, 6, 7}
        assert len(seen[1][0].tokens) - 1 == len(BUSHY.cut(num_ranks=3))
        assert torch.equal(
            output.sequences,
            build("llama").generate(**prompts("llama", "one"), max_new_tokens=16, do_sample=False),
        )


class TestIdentity:
    @pytest.mark.by_default(size=lambda size: size in (1, 3))
    @pytest.mark.parametrize(
        ("tree", "size"), [("auto", 1), ("chain", 2), (BUSHY.paths, 3), ("auto", 4)]
    )
    def test_greedy(self, size: int, tree: Any) -> None:
        for name, recurrent in (("llama", False), ("gemma3", True), ("gpt_neox", False)):
            for kind in ("one", "ragged"):
                plain = build(name).generate(
                    **prompts(name, kind), max_new_tokens=12, do_sample=False
                )
                head = random_head(name, size, 1, recurrent)
                output = generate(name, kind, head, 12, tree=tree)
                assert torch.equal(output.sequences, plain)

    @pytest.mark.parametrize(
        ("name", "tree"), [("llama", "falcon-vicuna"), ("qwen2", "falcon-llama")]
    )
    def test_published_trees(self, name: str, tree: str) -> None:
        for kind in ("one", "ragged"):
            plain = build(name).generate(**prompts(name, kind), max_new_tokens=12, do_sample=False)
            output = generate(name, kind, random_head(name, 2, 1), 12, tree=tree)
            assert torch.equal(output.sequences, plain)
            assert output.spec_stats.accepted_tokens > 0

    @pytest.mark.parametrize("size", [1, 3])
    def test_what_the_head_knows_is_accepted(self, size: int) -> None:
        plain = build("llama").generate(settled_prompt("llama"), max_new_tokens=40, do_sample=False)
        output = generate("llama", "one", knowing_head(size), 40, tree="chain")
        assert torch.equal(output.sequences, plain)
        stats = output.spec_stats
        rate = stats.accepted_by_position[0] / stats.drafted_by_position[0]
        assert rate > 0.8
        assert stats.tau > 0.6 * size
        # The second pass reads features that the first one predicted.
        assert sum(stats.accepted_by_position[size:]) > 0


class TestCost:
    @pytest.mark.parametrize(("size", "passes"), [(1, 6), (2, 3), (3, 2), (4, 2)])
    def test_passes(self, size: int, passes: int) -> None:
        with watch_drafts() as seen:
            output = generate("llama", "ragged", random_head("llama", size), tree=BUSHY.paths)
        assert max(count for *_, count in seen) == passes
        assert seen[1][3] == passes
        stats = output.spec_stats
        assert stats.draft_forwards == sum(count for *_, count in seen)
        assert stats.counters == {
            "draft_nodes": stats.drafted_tokens,
            "rounds": sum(row.target_forwards for row in stats.rows),
        }

    @pytest.mark.parametrize("new_tokens", [1, 2, 3, 4, 5])
    def test_nothing_is_drafted_beyond_the_maximum_length(self, new_tokens: int) -> None:
        with watch_drafts() as seen:
            generate("llama", "one", random_head("llama", 2), new_tokens, tree=BUSHY.paths)
        generated = 0
        for tree, tokens, _, passes in seen:
            generated = len(tokens[0]) - settled_prompt("llama").shape[1]
            room = new_tokens - generated - 1
            height = min(room, BUSHY.height) if generated else 0
            assert tree.height(0) == height
            assert passes == -(-height // 2)

    @pytest.mark.parametrize("depth", [1, 2, 3])
    def test_max_draft_tokens_cuts_the_tree(self, depth: int) -> None:
        with watch_drafts() as seen:
            generate("llama", "one", random_head("llama"), tree=BUSHY.paths, max_draft_tokens=depth)
        assert len(seen[1][0].tokens) - 1 == len(BUSHY.cut(depth))

    def test_finished_rows_are_left_out(self) -> None:
        plain = build("llama").generate(
            **prompts("llama", "ragged"), max_new_tokens=16, do_sample=False
        )
        eos = int(plain[2, -10])
        with watch_drafts() as seen:
            output = build("llama").generate(
                **prompts("llama", "ragged"),
                max_new_tokens=16,
                do_sample=False,
                eos_token_id=eos,
                spec_strategy=FalconConfig(tree=BUSHY.paths),
                assistant=random_head("llama"),
            )
        expected = build("llama").generate(
            **prompts("llama", "ragged"), max_new_tokens=16, do_sample=False, eos_token_id=eos
        )
        assert torch.equal(output, expected)
        assert len({len(rows) for _, _, rows, _ in seen}) > 1
        for tree, _, rows, _ in seen:
            assert [row for row in range(5) if tree.nodes(row)] == rows


class TestPolicies:
    @pytest.mark.parametrize(("threshold", "passes"), [(0.0, 3), (1.0, 1)])
    def test_confidence_at_its_limits(self, threshold: float, passes: int) -> None:
        with watch_drafts() as seen:
            generate(
                "llama",
                "ragged",
                random_head("llama", 2),
                tree=BUSHY.paths,
                length_policy="confidence",
                confidence_threshold=threshold,
            )
        assert seen[1][3] == passes
        assert {seen[1][0].height(row) for row in range(2)} == {2 * passes}

    def test_confidence_stops_each_row_behind_its_best_path(self) -> None:
        tree, threshold, size = RankTree.chain(6), 0.3, 2
        head = random_head("llama", size)
        with watch_drafts() as seen:
            generate(
                "llama",
                "ragged",
                head,
                tree=tree.paths,
                length_policy="confidence",
                confidence_threshold=threshold,
            )
        heights = Counter()
        for draft, *_ in seen[1:6]:
            for row in range(5):
                height = draft.height(row)
                ends = [draft.nodes(row)[depth] for depth in range(size, height + 1, size)]
                likely = [draft.node_probs[node] >= threshold for node in ends]
                assert all(likely[:-1])
                assert height == 6 or not likely[-1]
                heights[height] += 1
        assert len(heights) > 1

    def test_min_draft_tokens(self) -> None:
        with watch_drafts() as seen:
            generate(
                "llama",
                "one",
                random_head("llama", 2),
                tree="chain",
                max_draft_tokens=8,
                min_draft_tokens=3,
                length_policy="confidence",
                confidence_threshold=1.0,
            )
        assert seen[1][0].height(0) == 4

    def test_heuristic(self) -> None:
        with watch_drafts() as seen:
            generate(
                "llama",
                "one",
                random_head("llama", 2),
                tree="chain",
                max_draft_tokens=4,
                length_policy="heuristic",
            )
        # The prefill round has no draft; then the random head is wrong every time.
        assert [draft.height(0) for draft, *_ in seen[:6]] == [0, 4, 3, 2, 1, 1]


class TestUsedLists:
    def test_one_pass_over_parallel_positions(self) -> None:
        (lists,) = used_lists(RankTree.of(RAGGED), 4)
        assert lists.outputs == [0, 1, 2, 3]
        assert (lists.index, lists.order) == (None, None)

    def test_depths_that_are_not_drafted_are_not_read(self) -> None:
        passes = used_lists(RankTree.chain(7), 2)
        assert [lists.num_levels for lists in passes] == [2, 2, 2, 1]
        assert passes[-1].outputs == [0]
        assert passes[-1].index is not None
        assert passes[-1].order is None

    def test_blocks_of_several_heights(self) -> None:
        paths = [(0,), (1,), (2,), (0, 0), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 0, 0)]
        _, lists = used_lists(RankTree.of(paths), 2)
        # The block below (0, 0) has one level, the block below (1, 0) has two.
        assert lists.outputs == [0, 2, 3]
        assert lists.order is not None
        assert lists.order.tolist() == [0, 0, 1, 2]

    @pytest.mark.parametrize("size", SIZES)
    def test_every_node_has_a_list(self, size: int) -> None:
        for seed in range(4):
            self.check_lists(RankTree.of(random_paths(seed)), size)

    def check_lists(self, tree: RankTree, size: int) -> None:
        for index, lists in enumerate(used_lists(tree, size)):
            first = index * size
            blocks = sorted({p[:first] for p in tree.paths if len(p) > first})
            expected = {
                blocks.index(p[:first]) * size + len(p) - first - 1
                for p in tree.paths
                if first < len(p) <= first + size
            }
            assert lists.outputs == sorted(expected)

    @pytest.mark.parametrize("recurrent", [False, True])
    def test_on_the_device(self, recurrent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        head = random_head("llama", 2, 2, recurrent)
        options = {"tree": BUSHY.paths, "length_policy": "static"}
        run = lambda: generate("llama", "ragged", head, **options)  # noqa: E731
        check_same_drafts(monkeypatch, FalconDrafter, run)


class TestTrees:
    def test_the_known_ones_are_its_own(self) -> None:
        with pytest.raises(OptionError, match=r"known: auto, .*falcon-llama, or"):
            FalconConfig(tree="sdsat-5")

    def test_auto_is_the_stored_tree(self, tmp_path: Path) -> None:
        adapter = random_head("llama", 3).to_adapter({"tree": [[0], [1], [0, 2]], "max_depth": 6})
        save_adapter(tmp_path, adapter)
        with watch_drafts() as seen:
            generate("llama", "one", tmp_path)
        assert seen[1][0].parent == [-1, 0, 0, 1]
        # A changed folder is loaded again.
        before = len(seen)
        adapter = random_head("llama", 3).to_adapter({"tree": [[0]]})
        save_adapter(tmp_path, adapter)
        with watch_drafts() as seen:
            generate("llama", "one", str(tmp_path))
        assert before
        assert seen[1][0].num_nodes == 2

    @pytest.mark.parametrize("stored", [False, True])
    def test_the_likeliest_paths_are_sent(self, tmp_path: Path, stored: bool) -> None:
        own = {"tree": [list(path) for path in BUSHY.paths], "max_nodes": 7}
        save_adapter(tmp_path, random_head("llama").to_adapter(own))
        with watch_drafts() as seen:
            # The adapter's max_nodes applies only to its own tree.
            generate("llama", "batch", tmp_path, tree=BUSHY.paths)
        options: dict[str, Any] = {"tree": BUSHY.paths, "max_nodes": 7}
        if stored:
            options = {"length_policy": "static", "max_nodes": None}
        with watch_drafts() as pruned:
            output = generate("llama", "batch", tmp_path, **options)
        whole, some = seen[1][0], pruned[1][0]
        assert output.spec_stats.counters["draft_nodes"] > output.spec_stats.drafted_tokens
        for row in range(whole.num_rows):
            drafted, sent = reaches(whole, row), reaches(some, row)
            assert (len(drafted), len(sent)) == (len(BUSHY), 7)
            least = min(sent.values())
            assert sum(reach > least + 1e-6 for reach in drafted.values()) < 7
            assert all(abs(drafted[path] - reach) < 1e-4 for path, reach in sent.items())


class TestRefusals:
    def refuse(self, match: str, error: Any = AssistantError, **call: Any) -> None:
        call = {"spec_strategy": "falcon", "assistant": random_head("llama"), **call}
        refuse(match, error=error, **call)

    def test_assistants(self) -> None:
        """Other unsuitable assistants are tested in tests/methods/test_contract.py."""
        self.refuse("type LlamaForCausalLM is not a Falcon head", assistant=build("llama"))
        training = copy.deepcopy(random_head("llama")).train()
        self.refuse("in training mode", assistant=training)

    def test_heads_of_other_models(self, tmp_path: Path) -> None:
        self.refuse("other weights", assistant=random_head("qwen2"))
        self.refuse("has 16|has 2", model=small_llama(hidden_size=16))
        self.refuse(
            "vocab_size 97; .* has 101",
            model=small_llama(vocab_size=101, hidden_size=32, num_hidden_layers=3),
        )
        save_adapter(tmp_path, random_head("qwen2").to_adapter({}))
        self.refuse("other weights", assistant=tmp_path)

    def test_adapters_of_another_method(self) -> None:
        from tests.tiny_models import disco_adapter

        self.refuse("method 'disco', not 'falcon'", assistant=disco_adapter("llama"))

    @pytest.mark.parametrize("name", ["bloom", "nemotron"])
    def test_models_without_the_attention_interface(self, name: str) -> None:
        self.refuse("takes no attention function", UnsupportedError, model=build(name))

    @pytest.mark.parametrize("size", [1, 3])
    def test_published_trees_with_another_k(self, size: int) -> None:
        self.refuse(
            f"block_size 2; this one has {size}",
            OptionError,
            spec_strategy=FalconConfig(tree="falcon-vicuna"),
            assistant=random_head("llama", size),
        )

    def test_trees_deeper_than_the_head_was_trained_for(self, tmp_path: Path) -> None:
        save_adapter(tmp_path, random_head("llama").to_adapter({"max_depth": 3}))
        for tree in (BUSHY.paths, "falcon-llama"):
            config = FalconConfig(tree=tree)
            self.refuse(
                "deeper than the head was", OptionError, spec_strategy=config, assistant=tmp_path
            )
        generate("llama", "one", tmp_path, tree=BUSHY.paths, max_draft_tokens=3)
        generate("llama", "one", tmp_path)

    @pytest.mark.parametrize(
        "options", [{"tree": [[1, 0]]}, {"tree": "chain"}, {"max_depth": "6"}, {"max_nodes": 0}]
    )
    def test_adapters_with_odd_options(self, tmp_path: Path, options: dict[str, Any]) -> None:
        save_adapter(tmp_path, random_head("llama").to_adapter(options))
        self.refuse("Falcon adapter", assistant=tmp_path)

    @pytest.mark.parametrize(
        "options",
        [
            {"tree": "no-such-tree"},
            {"tree": 3},
            {"tree": None},
            {"tree": [[0], [0]]},
            {"tree": []},
            {"max_draft_tokens": 0},
            {"max_nodes": 0},
            {"min_draft_tokens": 0},
            {"length_policy": "none"},
            {"confidence_threshold": 2},
            {"adapter": "somewhere"},
        ],
    )
    def test_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(
            OptionError, match=r"tree|draft_tokens|max_nodes|length_policy|threshold|adapter"
        ):
            FalconConfig(**options)

    def test_nothing_runs_when_refused(self) -> None:
        head = random_head("llama", 3)
        with count_forwards(head.attention) as calls, pytest.raises(OptionError):
            generate("llama", "one", head, tree="falcon-llama")
        assert calls == []


def test_vocabulary_of_the_tests_is_wide_enough() -> None:
    assert published_trees("falcon")["falcon-llama"].tree.num_ranks < VOCAB
    assert len(ragged_batch()["input_ids"]) == 5


def head_with(**options: Any) -> FalconHead:
    head = FalconHead(build("llama"), FalconShape(2), None).eval()
    head.options = options
    return head


@pytest.mark.parametrize("size", SIZES)
def test_auto_without_a_stored_tree(size: int) -> None:
    tree = choose_tree("auto", None, random_head("llama", size))
    assert tree.height == 2 * size
    assert set(RankTree.chain(2 * size).paths) < set(tree.paths)
    assert len(tree) <= 2 * size + 3


def test_chains_are_as_deep_as_asked_or_two_passes() -> None:
    assert choose_tree("chain", None, random_head("llama", 3)) == RankTree.chain(6)
    assert choose_tree("chain", 5, random_head("llama", 2)) == RankTree.chain(5)
    assert choose_tree("chain", None, head_with(max_depth=3)) == RankTree.chain(3)


def test_trees_are_cut() -> None:
    own = head_with(tree=[[0], [0, 0], [1], [0, 0, 0]])
    assert choose_tree("auto", 2, own).paths == ((0,), (1,), (0, 0))
    assert choose_tree("falcon-vicuna", 1, random_head("llama")).height == 1


def test_trees_that_do_not_fit() -> None:
    assert max_depth(head_with()) is None
    with pytest.raises(AssistantError, match="max_depth='6'"):
        max_depth(head_with(max_depth="6"))
    with pytest.raises(AssistantError, match="tree cannot be used"):
        choose_tree("auto", None, head_with(tree="chain"))
    with pytest.raises(OptionError, match=r"depth 4 .* trained for \(3\)"):
        choose_tree(RankTree.chain(4).paths, None, head_with(max_depth=3))
    with pytest.raises(OptionError, match="block_size 2; this one has 3"):
        choose_tree("falcon-llama", None, random_head("llama", 3))


def test_a_head_of_another_strategy() -> None:
    with pytest.raises(AssistantError, match="not an adapter: use spec_strategy='eagle'"):
        resolve_falcon_head(published("eagle").folder, copy.deepcopy(build("llama")))
