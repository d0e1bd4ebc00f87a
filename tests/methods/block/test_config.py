"""`spec_strategy="block"`: chains, trees, lengths, batches, and rejected options."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_spec import AssistantError, BlockConfig, DraftConfig, OptionError
from hf_spec.adapters.published import PublishedHead
from hf_spec.common.compat import CACHE_NAME
from hf_spec.drafting.cost_model import cost_curves
from hf_spec.drafting.cost_model.adaptive_length_drafter import AdaptiveLengthDrafter
from hf_spec.drafting.one_pass_drafter import ProposalDrafter
from hf_spec.methods.registry import make_drafter
from tests.feature_reference import (
    BLOCK,
    LAYERS,
    block_outputs,
    block_reference,
    check_against,
    deepspec,
    dflash,
    dflash2,
    medusa,
    published,
    save,
    speculators,
    states_of,
    watch_drafts,
)
from tests.refusals import refuse
from tests.tiny_models import build, prompts, settled_prompt

MODEL = build("llama")
TREE = [[0], [1], [4], [0, 0], [0, 2], [1, 0], [4, 1], [0, 0, 0], [0, 0, 3], [1, 0, 0]]


def chain(depth: int) -> list[list[int]]:
    return [[0] * length for length in range(1, depth + 1)]


def generate(assistant: Any, kind: str = "ragged", new_tokens: int = 10, **options: Any) -> Any:
    inputs = prompts("llama", kind)
    output = MODEL.generate(
        **inputs,
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        assistant=assistant,
        spec_strategy=BlockConfig(**options),
    )
    plain = MODEL.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)
    assert torch.equal(output.sequences, plain)
    return output


@pytest.mark.by_default(shape=("tree",))
@pytest.mark.parametrize(
    ("head", "from_anchor"),
    [
        (dflash(), False),
        (dflash2(), False),
        (deepspec("gated"), True),
        (speculators("dspark", "rnn"), True),
    ],
    ids=["DFlash", "DFlash 2", "DSpark", "speculators"],
)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_every_draft_of_a_ragged_batch(
    head: PublishedHead, from_anchor: bool, shape: str, tmp_path: Path
) -> None:
    levels = BLOCK if from_anchor else BLOCK - 1
    options = {"tree": TREE} if shape == "tree" else {"children": 1, "max_draft_tokens": levels}
    with watch_drafts() as seen:
        output = generate(save(tmp_path / "head", head), **options)
    reference = block_reference(MODEL, head, from_anchor)
    paths = TREE if shape == "tree" else chain(levels)
    assert check_against(reference, seen, paths) > 100
    # One pass per round at any depth; the first round has no context yet.
    rounds = max(row.target_forwards for row in output.spec_stats.rows)
    assert output.spec_stats.draft_forwards in (rounds - 1, rounds - 2)


def test_drafts_after_some_were_accepted() -> None:
    """If every token is a child of the root, one is accepted in every round."""
    wide = [[rank] for rank in range(97)] + [[0, 0], [1, 0]]
    with watch_drafts() as seen:
        output = generate(deepspec(), "one", tree=wide)
    assert output.spec_stats.accepted_tokens > 3
    assert check_against(block_reference(MODEL, deepspec(), True), seen, wide) > 300


def test_a_reused_cache_hides_what_the_head_reads() -> None:
    cache, prompt = DynamicCache(config=MODEL.config), settled_prompt("llama")
    with torch.no_grad():
        MODEL(prompt[:, :20], **{CACHE_NAME: cache}, use_cache=True)
    with watch_drafts() as seen:
        output = MODEL.generate(
            prompt,
            **{CACHE_NAME: cache},
            max_new_tokens=8,
            do_sample=False,
            spec_strategy=BlockConfig(tree=TREE),
            assistant=dflash(),
        )
    assert torch.equal(output, MODEL.generate(prompt, max_new_tokens=8, do_sample=False))
    reference = block_reference(MODEL, dflash(), False, begin=20)
    assert check_against(reference, seen, TREE) > 30


def test_the_confidence_head_ends_a_draft() -> None:
    """A draft ends after the first token below the threshold, which is still sent."""
    head, threshold = deepspec(), 0.5
    t = head.tensors
    with watch_drafts() as seen:
        generate(head, length_policy="head", confidence_threshold=threshold)
    heights = set()
    for tree, texts, unfinished in seen[1:-BLOCK]:
        for row in unfinished:
            tokens = [tree.tokens[node] for node in tree.nodes(row)]
            states = states_of(MODEL, texts[row][:-1], LAYERS)
            block = t["embed_tokens.weight"][[tokens[0], *[96] * (BLOCK - 1)]]
            outputs = block_outputs(t, states, block, ((None, False),) * 2)
            sure = []
            for token, place in zip(tokens, outputs, strict=False):
                read = torch.cat([place, t["markov_head.markov_w1.weight"][token]])
                logit = t["confidence_head.proj.weight"][0] @ read
                sure.append(float((logit + t["confidence_head.proj.bias"][0]).sigmoid()))
            drafted = len(tokens) - 1
            assert all(chance >= threshold for chance in sure[: drafted - 1])
            assert drafted == BLOCK or sure[drafted - 1] < threshold
            heights.add(drafted)
    assert len(heights) > 1


def test_layers_that_the_config_does_not_name() -> None:
    inner = {**dflash().config["dflash_config"], "target_layer_ids": None}
    config = {**dflash().config, "dflash_config": inner}
    head = published("dflash", config, dflash().tensors)
    missing = "pass BlockConfig\\(aux_layers="
    refuse(missing, error=AssistantError, spec_strategy="block", assistant=head)
    with watch_drafts() as seen:
        generate(head, tree=TREE, aux_layers=LAYERS)
    assert check_against(block_reference(MODEL, dflash(), False), seen, TREE) > 100
    with watch_drafts() as seen:
        generate(head, tree=TREE, aux_layers=[1, 3])
    with pytest.raises(AssertionError):
        check_against(block_reference(MODEL, dflash(), False), seen, TREE)
    wrong = "configured for the hidden states \\[9, 1\\], but its weights read 2 .* from 0 to 3"
    config = BlockConfig(aux_layers=[9, 1])
    refuse(wrong, error=AssistantError, spec_strategy=config, assistant=head)


def test_a_draft_window_changes_drafts_but_not_the_output() -> None:
    with watch_drafts() as seen:
        generate(dflash(), tree=TREE, draft_window=6)
    near = block_reference(MODEL, dflash(), False, ((6, False),) * 2)
    assert check_against(near, seen, TREE) > 100
    with pytest.raises(AssertionError):
        check_against(block_reference(MODEL, dflash(), False), seen, TREE)


def test_the_embedding_may_be_read_scaled() -> None:
    drafted = []
    for scale in (None, 1.0, 6.0):
        with watch_drafts() as seen:
            generate(dflash(), tree=TREE, embedding_scale=scale)
        drafted.append([tree.tokens for tree, _, _ in seen])
    assert drafted[0] == drafted[1] != drafted[2]


def test_a_head_in_bfloat16_beside_a_float16_target() -> None:
    model = type(MODEL)(MODEL.config).to(torch.float16)
    for strategy, head in (("block", deepspec()), ("block", dflash2()), ("heads", medusa())):
        output = model.generate(
            **prompts("llama", "ragged"),
            max_new_tokens=4,
            do_sample=False,
            return_dict_in_generate=True,
            spec_strategy=strategy,
            assistant=head,
        )
        assert output.spec_stats.draft_forwards > 0


class TestChainOrTree:
    """Without options, the cost model chooses the nodes of a tree."""

    def generate(
        self, monkeypatch: pytest.MonkeyPatch, first: float, node_cost: float
    ) -> tuple[Any, list[int]]:
        """Generate with drafts that rank the target's token first at a share `first` of positions.

        At the other positions it is ranked second. Returns the statistics and, for each round, the
        largest number of children of a node.
        """
        inputs, limits = prompts("llama", "one"), {"max_new_tokens": 80, "do_sample": False}
        answer = MODEL.generate(**inputs, **limits)[0].tolist()

        def probabilities(_: Any, state: Any, growth: Any) -> torch.Tensor:
            probs = torch.full((len(growth.owners), 97), 0.1 / 95)
            for place, depth in enumerate(growth.node_depths()):
                index = len(state.tokens[0]) + depth
                token = answer[index % len(answer)]
                is_first = (index * 0.618) % 1.0 < first
                probs[place, token] = 0.5 if is_first else 0.4
                probs[place, (token + 1) % 97] = 0.4 if is_first else 0.5
            return probs

        monkeypatch.setattr(ProposalDrafter, "probabilities", probabilities)
        monkeypatch.setattr(cost_curves, "NODE_COST", node_cost)
        widths: list[int] = []
        draft = AdaptiveLengthDrafter.draft

        def watch(*arguments: Any) -> Any:
            tree = draft(*arguments)
            widths.append(max(map(len, tree.children)))
            return tree

        monkeypatch.setattr(AdaptiveLengthDrafter, "draft", watch)
        output = MODEL.generate(
            **inputs,
            **limits,
            return_dict_in_generate=True,
            assistant=deepspec(),
            spec_strategy="block",
        )
        assert output.sequences[0].tolist() == answer
        return output.spec_stats, widths

    def test_siblings_that_are_often_right_are_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stats, widths = self.generate(monkeypatch, first=0.5, node_cost=0.01)
        assert sum(width > 1 for width in widths) > len(widths) / 2
        assert stats.accepted_tokens > 2.5 * stats.target_forwards

    def test_siblings_that_are_never_right_are_not_sent(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stats, widths = self.generate(monkeypatch, first=1.0, node_cost=0.1)
        assert max(widths[-5:]) == 1
        assert stats.accepted_tokens > 2 * stats.target_forwards

    def test_a_chain_pays_where_no_tree_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Three nodes per level would cost more than they gain; one node does not."""
        stats, widths = self.generate(monkeypatch, first=0.8, node_cost=0.35)
        assert widths.count(1) > len(widths) / 2
        assert stats.accepted_tokens > 0.5 * stats.target_forwards

    def test_nothing_is_sent_where_rows_are_expensive(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stats, _ = self.generate(monkeypatch, first=0.5, node_cost=3.0)
        assert stats.drafted_tokens == 0

    @pytest.mark.parametrize(
        ("options", "children", "draws"),
        [
            ({}, 3, False),
            ({"max_draft_tokens": 4}, 3, False),
            ({"children": 2}, 2, False),
            ({"children": 1}, 1, True),
            ({"children": 1, "sample_drafts": False}, 1, False),
            ({"sample_drafts": True}, 1, True),
            ({"sample_drafts": False}, 3, False),
            ({"children": 3, "sample_drafts": True}, 3, True),
            ({"length_policy": "head"}, 1, True),
        ],
    )
    def test_shapes(self, options: dict[str, Any], children: int, draws: bool) -> None:
        config = BlockConfig(**options)
        assert (config.shape.children, config.draws) == (children, draws)
        drafter = make_drafter(config, MODEL, deepspec())
        by_cost = children > 1 and not draws
        measured = not config.leaves_sizes_open or config.length_policy is not None
        assert isinstance(drafter, AdaptiveLengthDrafter) == (by_cost or not measured)


class TestRefused:
    def test_a_confidence_head_that_is_not_there(self) -> None:
        config = BlockConfig(length_policy="head")
        match = "this head has no confidence head"
        refuse(match, error=AssistantError, spec_strategy=config, assistant=dflash())
        with pytest.raises(OptionError, match="drafters of DraftConfig do not have"):
            DraftConfig(length_policy="head")

    def test_a_head_of_another_target(self) -> None:
        small = deepspec(size=16)
        match = "its weights read 1 of width 32"
        refuse(match, error=AssistantError, spec_strategy="block", assistant=small)

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"aux_layers": "all"}, "aux_layers='all' must be a list"),
            ({"aux_layers": [1.5]}, "must be a list of indices"),
            ({"embedding_scale": -1}, "embedding_scale must be"),
            ({"draft_window": 0}, "draft_window must be a whole number of at least 1"),
        ],
    )
    def test_options(self, options: dict[str, Any], match: str) -> None:
        with pytest.raises(OptionError, match=match):
            BlockConfig(**options)
