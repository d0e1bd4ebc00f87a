"""The lookup drafter: choice and order of its branches, and its limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_spec import AssistantError, LookupConfig, LookupStore, OptionError
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.methods.lookup.drafter import LookupDrafter
from tests import tiny_models


def start(*rows: Sequence[int], new_tokens: int = 50) -> GenerationState:
    batch = tiny_models.left_padded([torch.tensor(row) for row in rows])
    width = batch["input_ids"].shape[1]
    stop = StopRules([MaxLengthCriteria(width + new_tokens)], len(rows))
    return GenerationState.create(**batch, stop=stop)


def draft(
    state: GenerationState, drafter: LookupDrafter | None = None, **options: Any
) -> DraftTree:
    drafter = drafter or LookupDrafter(LookupConfig(**options))
    with drafter.active(state):
        return drafter.draft(state, state.draft_limits)


def shape(tree: DraftTree) -> tuple[list[int], list[int]]:
    return tree.tokens, tree.parent


class TestOrder:
    # (5, 6) precedes 10 and 30; 6 after another token precedes 20 and 40.
    SEQUENCE = (5, 6, 10, 11, 9, 6, 20, 21, 5, 6, 30, 31, 6, 40, 41, 5, 6)

    def test_longest_match_first_then_newest(self) -> None:
        tree = draft(start(self.SEQUENCE), copy_length=1, max_matches=4)
        assert shape(tree) == ([6, 30, 10, 40, 20], [-1, 0, 0, 0, 0])

    @pytest.mark.parametrize("matches", [1, 2, 3])
    def test_max_matches_keeps_the_best(self, matches: int) -> None:
        tree = draft(start(self.SEQUENCE), copy_length=1, max_matches=matches)
        assert tree.tokens[1:] == [30, 10, 40, 20][:matches]

    def test_min_match_length_leaves_short_matches_out(self) -> None:
        tree = draft(start(self.SEQUENCE), copy_length=1, max_matches=9, min_match_length=2)
        assert tree.tokens[1:] == [30, 10]

    def test_match_length_one_takes_the_newest(self) -> None:
        tree = draft(start(self.SEQUENCE), copy_length=1, max_matches=2, match_length=1)
        assert tree.tokens[1:] == [40, 30]


class TestKinds:
    @pytest.mark.parametrize(
        ("length", "kind"), [(0, 0), (1, 1), (2, 2), (3, 3), (7, 3), (8, 8), (11, 8)]
    )
    def test_the_longest_match_decides(self, length: int, kind: int) -> None:
        repeated = range(40, 40 + length)
        drafter = LookupDrafter(LookupConfig())
        draft(start([5, *repeated, 6, 7, *repeated] if length else [5, 6, 7]), drafter)
        assert drafter.draft_kind(0) == kind

    def test_rows_differ(self) -> None:
        drafter = LookupDrafter(LookupConfig())
        draft(start([5, 6, 7, 5, 6], [7, 8, 7], [7, 8, 9]), drafter)
        assert [drafter.draft_kind(row) for row in range(3)] == [2, 1, 0]


class TestTrie:
    def test_common_prefixes_are_one_path(self) -> None:
        tree = draft(start((5, 6, 7, 8, 5, 6, 7, 9, 5, 6)), copy_length=2)
        assert shape(tree) == ([6, 7, 9, 8], [-1, 0, 1, 1])

    def test_an_occurrence_that_adds_nothing_is_no_branch(self) -> None:
        sequence = (5, 6, 1, 2, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6)
        tree = draft(start(sequence), copy_length=2, max_matches=2)
        assert shape(tree) == ([6, 7, 8, 1, 2], [-1, 0, 1, 0, 3])

    def test_copy_length(self) -> None:
        sequence = (5, 6, *range(10, 30), 5, 6)
        tree = draft(start(sequence), copy_length=4, max_matches=1)
        assert shape(tree) == ([6, 10, 11, 12, 13], [-1, 0, 1, 2, 3])

    def test_max_draft_tokens_counts_all_branches(self) -> None:
        sequence = (5, 6, 10, 11, 12, 5, 6, 20, 21, 22, 5, 6)
        tree = draft(start(sequence), copy_length=3, max_draft_tokens=5)
        assert shape(tree) == ([6, 20, 21, 22, 10, 11], [-1, 0, 1, 2, 0, 4])

    def test_a_copy_ends_with_the_text(self) -> None:
        assert shape(draft(start((5, 5, 5)), max_matches=1)) == ([5, 5], [-1, 0])

    @pytest.mark.parametrize("new_tokens", [1, 2, 4])
    def test_nothing_is_drafted_beyond_the_maximum_length(self, new_tokens: int) -> None:
        # The target adds one bonus token to every draft.
        sequence = (5, 6, *range(10, 30), 5, 6)
        tree = draft(start(sequence, new_tokens=new_tokens))
        assert tree.height(0) == new_tokens - 1

    @pytest.mark.parametrize("sequence", [(5,), (5, 6), (5, 6, 7, 8)])
    def test_without_a_match_there_is_the_root_alone(self, sequence: tuple[int, ...]) -> None:
        assert shape(draft(start(sequence))) == ([sequence[-1]], [-1])


class TestIndex:
    def test_it_grows_with_the_output(self) -> None:
        state = start((5, 6, 7, 8))
        drafter = LookupDrafter(LookupConfig(copy_length=2, max_matches=1))
        assert draft(state, drafter).num_nodes == 1
        for token in (9, 3, 5):
            state.append(0, token)
        assert draft(state, drafter).tokens == [5, 6, 7]
        for token in (6, 9, 3):
            state.append(0, token)
        # (9, 3) was generated; it is not in the prompt.
        assert draft(state, drafter).tokens == [3, 5, 6]

    def test_growing_equals_starting_again(self) -> None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(3, 7, (60,), generator=generator).tolist()
        state = start(tokens[:5], new_tokens=60)
        drafter = LookupDrafter(LookupConfig(match_length=3, max_matches=3))
        for length in range(5, 50):
            fresh = start(tokens[:length], new_tokens=60)
            expected = draft(fresh, match_length=3, max_matches=3)
            got = draft(state, drafter)
            # Both have room for whole copies, so the trees are the same.
            assert shape(got) == shape(expected)
            state.append(0, tokens[length])

    def test_a_row_begins_again_without_the_text_before(self) -> None:
        drafter = LookupDrafter(LookupConfig(copy_length=1))
        draft(start((5, 6, 7, 5, 6)), drafter)
        drafter.restart(0)
        later = start((1, 2, 3, 4, 5, 6))
        assert drafter.draft(later, later.draft_limits).tokens == [6]

    def test_rows_are_looked_up_in_themselves(self) -> None:
        state = start((5, 6, 7, 5, 6), (8, 6), (6, 9, 9, 9, 6), (3,))
        tree = draft(state, copy_length=1)
        rows = [[tree.tokens[n] for n in tree.nodes(row)] for row in range(4)]
        assert rows == [[6, 7], [6], [6, 9], [3]]

    def test_padding_is_never_copied(self) -> None:
        tree = draft(start((5, 6, 7, 5, 6), (0, 4, 0)), copy_length=5)
        assert [tree.tokens[n] for n in tree.nodes(1)] == [0, 4, 0]

    def test_a_finished_row_has_no_nodes(self) -> None:
        state = start((5, 6, 7, 5, 6), (5, 6, 7, 5, 6))
        state.finished[0] = True
        tree = draft(state, copy_length=1)
        assert [len(tree.nodes(row)) for row in range(2)] == [0, 2]


class TestPromptOnly:
    """Generated tokens are matched, but not copied."""

    def test_matches_and_copies_end_with_the_prompt(self) -> None:
        state = start((5, 6, 7, 8, 9), new_tokens=30)
        drafter, whole = (
            LookupDrafter(LookupConfig(copy_length=6, prompt_only=only)) for only in (True, False)
        )
        for drafted in (drafter, whole):
            assert draft(state, drafted).tokens == [9]
        # The last token first repeats the prompt (6), then only the output (1).
        for token in (1, 2, 3, 1, 2, 6):
            state.append(0, token)
        assert draft(state, drafter).tokens == [6, 7, 8, 9]
        assert draft(state, whole).tokens == [6, 7, 8, 9, 1, 2, 3]
        state.append(0, 1)
        assert draft(state, drafter).tokens == [1]
        assert len(draft(state, whole).tokens) > 1

    @pytest.mark.parametrize("sizes", [{}, {"copy_length": 5}])
    def test_greedy_is_identical_and_copies_less(self, sizes: dict[str, int]) -> None:
        model = tiny_models.build("llama")
        options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
        inputs = tiny_models.ragged_batch()
        expected = model.generate(**inputs, **options)
        drafted = []
        for only in (True, False):
            output = model.generate(
                **inputs,
                **options,
                spec_strategy=LookupConfig(prompt_only=only, **sizes),
                return_dict_in_generate=True,
            )
            assert torch.equal(output.sequences, expected)
            drafted.append(output.spec_stats.drafted_tokens)
        assert drafted[0] < drafted[1] or not sizes

    def test_answers_are_no_prompt(self) -> None:
        with pytest.raises(OptionError, match="exclude each other"):
            LookupConfig(prompt_only=True, across_answers=True)
        with pytest.raises(OptionError, match="cannot copy from a LookupStore"):
            tiny_models.build("llama").generate(
                torch.tensor([[5, 6, 5]]),
                max_new_tokens=2,
                spec_strategy=LookupConfig(prompt_only=True),
                assistant=LookupStore(),
            )


class TestGenerate:
    @pytest.mark.parametrize("kind", ["one", "ragged"])
    def test_long_matches_and_many_branches(self, kind: str) -> None:
        model = tiny_models.build("llama")
        config = LookupConfig(match_length=4, copy_length=3, max_matches=5, max_draft_tokens=9)
        options = {**tiny_models.prompts("llama", kind), "max_new_tokens": 24, "do_sample": False}
        output = model.generate(**options, spec_strategy=config, return_dict_in_generate=True)
        assert torch.equal(output.sequences, model.generate(**options))
        assert output.spec_stats.accepted_tokens > 0
        assert len(output.spec_stats.drafted_by_position) <= 3
        assert output.spec_stats.draft_forwards == 0


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {"match_length": 0},
            {"match_length": 65},
            {"match_length": 2, "min_match_length": 3},
            {"min_match_length": 0},
            {"copy_length": 0},
            {"copy_length": 2.5},
            {"max_matches": 0},
            {"max_matches": True},
            {"max_draft_tokens": 0},
            {"max_draft_tokens": "7"},
        ],
    )
    def test_errors_name_the_option(self, options: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match=list(options)[-1]):
            LookupConfig(**options)

    def test_an_assistant_is_refused(self) -> None:
        model = tiny_models.build("llama")
        with pytest.raises(AssistantError, match="takes no assistant, got LlamaForCausalLM"):
            model.generate(
                tiny_models.repetitive_prompt(),
                max_new_tokens=4,
                spec_strategy="lookup",
                assistant=model,
            )
