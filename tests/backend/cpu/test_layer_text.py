"""Where statements and memory of a program come to lie."""

from __future__ import annotations

import torch

from hf_spec.backend.cpu.layer_text import LayerText
from hf_spec.backend.cpu.layer_values import TOKENS, Leaf, Value, combined


def doubled(leaf: Leaf) -> Value:
    return combined("({} + {})".format, [Value.of(leaf, torch.float32)] * 2)


def given(text: LayerText, *shape: int, name: str = "in0") -> Leaf:
    return text.array(torch.empty(shape, device="meta"), torch.float32, name, "inputs[0]")


class TestLoops:
    def test_statements_on_one_token_share_a_loop(self) -> None:
        text = LayerText()
        once = text.stored(doubled(given(text, TOKENS, 4)))
        text.stored(doubled(once.leaves[0]))
        assert text.whole().count("for (int64_t token") == 1

    def test_one_on_all_tokens_ends_it(self) -> None:
        text = LayerText()
        once = text.stored(doubled(given(text, TOKENS, 4)))
        text.for_all("multiply();", once.leaves)
        text.stored(doubled(once.leaves[0]))
        first, second = text.whole().split("multiply();")
        assert first.count("for (int64_t token") == second.count("for (int64_t token") == 1

    def test_what_no_token_changes_comes_before(self) -> None:
        text = LayerText()
        fixed = text.stored(doubled(given(text, 4)))
        text.stored(combined("({} * {})".format, [fixed, doubled(given(text, TOKENS, 4))]))
        before, _ = text.whole().split("for (int64_t token")
        assert "narrow(" in before


class TestMemory:
    def test_that_of_one_loop_is_its_own(self) -> None:
        text = LayerText()
        text.stored(doubled(given(text, TOKENS, 4)))
        assert "scratch(0)" in text.whole()
        assert "alignas(64) float b1[4];" in text.whole()

    def test_that_of_several_is_kept_for_every_token(self) -> None:
        text = LayerText()
        once = text.stored(doubled(given(text, TOKENS, 4)))
        text.for_all("multiply();", once.leaves)
        assert "aligned(4 * tokens * sizeof(float))" in text.whole()

    def test_what_lies_otherwise_is_put_in_order(self) -> None:
        text = LayerText()
        value = Value.of(given(text, TOKENS, 4), torch.float32)
        assert text.in_memory(value, lambda form: form.is_contiguous()) is value.leaves[0]
        assert text.in_memory(value, lambda form: False) is not value.leaves[0]
