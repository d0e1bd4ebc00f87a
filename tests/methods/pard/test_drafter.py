"""PARD: one pass predicts all positions, and keys and values of masks are never reused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec import AssistantError, OptionError, PardConfig
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.pard.drafter import PardDrafter
from tests.methods.draft_model.test_drafter import count_tokens, cut, paths, start
from tests.test_distribution import ALPHA, REPETITIVE, TOP_K, worst_p_value
from tests.tiny_models import (
    VOCAB,
    build,
    draft_model,
    pard_model,
    ragged_batch,
    repetitive_prompt,
)

PROMPT = repetitive_prompt()
PLACES = 4
MASK = VOCAB - 1
LENGTHS = (12, 9, 5)


@torch.no_grad()
def reference(text: Sequence[int], count: int = PLACES) -> Tensor:
    """Return (count, V) probabilities after the text and after each mask, without a cache."""
    ids = torch.tensor([[*text, *[MASK] * (count - 1)]])
    return pard_model("llama")(ids, use_cache=False).logits[0, -count:].softmax(dim=-1)


@torch.no_grad()
def draft(drafter: PardDrafter, state: GenerationState) -> DraftTree:
    with drafter.active(state):
        return drafter.draft(state, state.draft_limits)


def accept(
    drafter: PardDrafter, state: GenerationState, tree: DraftTree, counts: Sequence[int]
) -> None:
    """Accept the first `counts[row]` tokens of each row's chain, and add a bonus token."""
    accepted = [list(tree.nodes(row)[1 : count + 1]) for row, count in enumerate(counts)]
    verdict = Verdict(tree, accepted, [7] * len(counts))
    for row in range(len(counts)):
        for token in verdict.tokens(row):
            state.append(row, token)
    drafter.observe(verdict, ForwardOutput(torch.empty(0)))


def check(state: GenerationState, tree: DraftTree) -> None:
    for row, text in enumerate(state.tokens):
        likely, tokens = reference(text).max(dim=-1)
        nodes = list(tree.nodes(row))
        assert [tree.tokens[node] for node in nodes[1:]] == tokens.tolist()
        assert tree.parent[nodes[1] : nodes[-1] + 1] == nodes[:-1]
        found = torch.tensor([tree.node_probs[node] for node in nodes[1:]])  # type: ignore[index]
        assert (found - likely).abs().max() < 1e-5


class TestParity:
    def test_two_rounds_are_what_the_model_says_without_a_cache(self) -> None:
        state = start(ragged_batch(LENGTHS))
        drafter = PardDrafter(PardConfig(max_draft_tokens=PLACES), pard_model("llama"))
        tree = draft(drafter, state)
        check(state, tree)
        accept(drafter, state, tree, (2, 0, PLACES))
        check(state, draft(drafter, state))

    def test_what_a_mask_left_is_not_what_its_token_leaves(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a cache that keeps accepted drafts, the test above must fail."""
        keep = ModelRunner.keep
        monkeypatch.setattr(ModelRunner, "keep", lambda self, _: keep(self, [[1, 2], [], [1]]))
        state = start(ragged_batch(LENGTHS))
        drafter = PardDrafter(PardConfig(max_draft_tokens=PLACES), pard_model("llama"))
        tree = draft(drafter, state)
        check(state, tree)
        accept(drafter, state, tree, (2, 0, 1))
        with pytest.raises(AssertionError):
            check(state, draft(drafter, state))

    def test_accepted_drafts_are_fed_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = PardConfig(max_draft_tokens=PLACES)
        rounds: list[tuple[int, int]] = []
        observe = PardDrafter.observe

        def watch(self: PardDrafter, verdict: Verdict, output: ForwardOutput) -> None:
            rounds.append((verdict.tree.height(0), len(verdict.accepted[0])))
            observe(self, verdict, output)

        monkeypatch.setattr(PardDrafter, "observe", watch)
        with count_tokens(pard_model("llama")) as seen:
            build("llama").generate(
                PROMPT,
                max_new_tokens=24,
                do_sample=False,
                spec_strategy=config,
                assistant=pard_model("llama"),
            )
        expected, new = [], PROMPT.shape[1]
        for height, accepted in rounds:
            expected += [new + height - 1] if height else []
            new = accepted + 1
        assert seen == expected
        assert any(accepted for _, accepted in rounds)

    def test_a_saved_model_is_read_back(self, tmp_path: Path) -> None:
        draft_model("llama").save_pretrained(tmp_path)
        text = (tmp_path / "config.json").read_text(encoding="utf-8")
        added = text.replace("{", f'{{"pard_token": {MASK}, "spd_type": "pard",', 1)
        (tmp_path / "config.json").write_text(added, encoding="utf-8")
        outputs = [
            build("llama").generate(
                PROMPT,
                max_new_tokens=12,
                do_sample=False,
                spec_strategy=PardConfig(max_draft_tokens=3),
                assistant=assistant,
                return_dict_in_generate=True,
            )
            for assistant in (str(tmp_path), pard_model("llama"))
        ]
        first, second = (output.spec_stats.accepted_by_position for output in outputs)
        assert first == second
        assert sum(first) > 0


class TestTrees:
    def test_the_likeliest_paths_are_sent(self) -> None:
        config = PardConfig(max_draft_tokens=3, children=3, max_nodes=10)
        tree = draft(PardDrafter(config, pard_model("llama")), start({"input_ids": PROMPT}))
        probs = reference(PROMPT[0].tolist(), 3)
        every = {(): 1.0}
        for row in probs:
            likely, tokens = (part.tolist() for part in row.topk(3))
            every |= {
                (*path, token): every[path] * chance
                for path in [p for p in every if len(p) == max(map(len, every))]
                for token, chance in zip(tokens, likely, strict=True)
            }
        best = sorted(every, key=lambda path: -every[path])[1:11]
        assert sorted(paths(tree)) == sorted(best)
        assert len({len(path) for path in best}) > 1

    def test_nothing_follows_an_end_of_sequence(self) -> None:
        config = PardConfig(max_draft_tokens=3, children=2, max_nodes=20)
        drafter = PardDrafter(config, pard_model("llama"))
        free = draft(drafter, start({"input_ids": PROMPT}))
        end = free.tokens[1]
        tree = draft(drafter, start({"input_ids": PROMPT}, eos=[end]))
        assert any(end in path[:-1] for path in paths(free))
        assert any(end in path for path in paths(tree))
        assert all(end not in path[:-1] for path in paths(tree))


class TestLengths:
    def test_one_forward_however_deep(self) -> None:
        drafter = PardDrafter(PardConfig(max_draft_tokens=PLACES), pard_model("llama"))
        draft(drafter, start(ragged_batch(LENGTHS)))
        assert drafter.forwards == drafter.num_forwards(PLACES) == 1

    @pytest.mark.parametrize("new_tokens", [1, 3])
    def test_no_further_than_there_is_room(self, new_tokens: int) -> None:
        drafter = PardDrafter(PardConfig(max_draft_tokens=PLACES), pard_model("llama"))
        tree = draft(drafter, start({"input_ids": PROMPT}, new_tokens))
        assert tree.height(0) == new_tokens - 1
        assert drafter.forwards == int(new_tokens > 1)

    def test_masks_end_at_the_last_position_of_the_model(self) -> None:
        """The root and K - 1 masks run; a row whose root has no position drafts nothing."""
        model = cut()
        model.config.pard_token = MASK
        drafter = PardDrafter(PardConfig(max_draft_tokens=5), model)
        tree = draft(drafter, start(ragged_batch((26, 22, 10))))
        assert [tree.height(row) for row in range(3)] == [0, 3, 5]
        assert drafter._runner.rows.stored == [0, 22, 10]

    def test_confidence_cuts_each_row_after_an_unlikely_token(self) -> None:
        state, threshold = start(ragged_batch(LENGTHS)), 0.16
        config = PardConfig(
            max_draft_tokens=PLACES, length_policy="confidence", confidence_threshold=threshold
        )
        tree = draft(PardDrafter(config, pard_model("llama")), state)
        expected = []
        for text in state.tokens:
            likely = reference(text).max(dim=-1).values.tolist()
            unlikely = [n for n, chance in enumerate(likely, 1) if chance < threshold]
            expected.append(min([*unlikely, PLACES]))
        assert [tree.height(row) for row in range(len(LENGTHS))] == expected
        assert len(set(expected)) > 1

    def test_a_policy_is_asked_after_the_least_number(self) -> None:
        config = PardConfig(
            max_draft_tokens=PLACES,
            min_draft_tokens=3,
            length_policy="confidence",
            confidence_threshold=1.0,
        )
        tree = draft(PardDrafter(config, pard_model("llama")), start({"input_ids": PROMPT}))
        assert tree.height(0) == 3


def test_greedy_output_of_trees_is_the_targets_own() -> None:
    """Chains and length policies are tested in tests/methods/test_contract.py."""
    batch = ragged_batch()
    model = build("llama")
    plain = model.generate(**batch, max_new_tokens=16, do_sample=False)
    output = model.generate(
        **batch,
        max_new_tokens=16,
        do_sample=False,
        spec_strategy=PardConfig(children=2, length_policy="heuristic"),
        assistant=pard_model("llama"),
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, plain)
    assert output.spec_stats.accepted_tokens > 0


def test_sampled_output_has_the_targets_distribution() -> None:
    """tests/test_distribution.py uses more draws, and detects a broken twin."""
    assert worst_p_value([REPETITIVE], TOP_K, "pard", draws=600) > ALPHA


class TestRefusals:
    def test_a_model_without_a_mask_token(self) -> None:
        with pytest.raises(AssistantError, match="no pard_token in its config"):
            build("llama").generate(PROMPT, spec_strategy="pard", assistant=draft_model("llama"))

    @pytest.mark.parametrize("token", [VOCAB, -1, "96", True])
    def test_a_mask_token_outside_the_vocabulary(self, token: Any) -> None:
        model = copy.copy(pard_model("llama"))
        model.config = copy.deepcopy(model.config)
        model.config.pard_token = token
        with pytest.raises(AssistantError, match=f"pard_token={token!r}"):
            build("llama").generate(PROMPT, spec_strategy="pard", assistant=model)

    @pytest.mark.parametrize("options", [{"children": 0}, {"max_nodes": 0}, {"sample_drafts": 1}])
    def test_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match=next(iter(options))):
            PardConfig(**options)
