"""C++ text of compiled layers: numbers, loops, the order of statements, and memory."""

from __future__ import annotations

import pytest
import torch

from hf_spec.backend.cpu.layer_text import (
    TOKENS,
    Array,
    LayerText,
    Leaf,
    SourceError,
    Value,
    combined,
    constant,
    inner_axes,
    loops,
    token_axis,
)


def value(name: str, *shape: int) -> Value:
    return Value.of(Leaf(name, torch.empty(shape, device="meta")), torch.float32)


def test_a_number_is_found_by_its_axes_without_that_of_tokens() -> None:
    form = torch.empty(1, TOKENS, 3, 4, device="meta").transpose(1, 2)
    assert Leaf("b0", form).at == "b0[0 + 4 * i1 + 1 * i3]"
    assert Leaf("b0", form[..., 2:]).at == "b0[2 + 4 * i1 + 1 * i3]"
    assert Leaf("b0", form[..., 2:]).address == "all_b0 + 2"
    assert (token_axis(form.shape), inner_axes(form.shape)) == (2, [0, 1, 3])
    assert token_axis(torch.Size([3, 4])) is None


def test_what_is_the_same_for_all_has_no_step() -> None:
    wide = value("in1", 4).expand(torch.Size([1, TOKENS, 4]))
    assert wide.expression == "number(in1[0 + 1 * i2])"
    assert value("in1", 1, 1).expand(torch.Size([TOKENS, 4])).expression == "number(in1[0])"


def test_expressions_are_put_together() -> None:
    found = combined("({} * {})".format, [value("a", 2, 4), 0.5])
    found = combined("({} + {})".format, [found, value("b", 4)])
    assert found.shape == (2, 4)
    assert found.expression == "((number(a[0 + 4 * i0 + 1 * i1]) * 0.5f) + number(b[0 + 1 * i1]))"
    assert found.leaf is None
    assert found.cast(torch.bfloat16).code == "rounded((({} * 0.5f) + {}))"
    assert found.cast(torch.bfloat16).cast(torch.float32).code.startswith("rounded(")


def test_loops_leave_out_what_is_single() -> None:
    shape = torch.Size([1, 3, TOKENS, 4])
    assert loops(shape, [0, 1, 3], "") == [
        "for (int64_t i1 = 0; i1 < 3; ++i1)",
        "#pragma omp simd ",
        "for (int64_t i3 = 0; i3 < 4; ++i3)",
    ]
    assert loops(shape, [0]) == []


def test_memory_of_one_loop_is_its_own() -> None:
    array = Array(torch.bfloat16, 64, by_token=True, used={2})
    assert array.is_local
    assert array.kind == "bfloat16"
    array.used.add(3)
    assert not array.is_local
    assert not Array(torch.float32, 64, by_token=False, used={2}).is_local
    assert not Array(torch.float32, 1 << 20, by_token=True, used={2}).is_local


@pytest.mark.parametrize(("number", "code"), [(2, "2.0f"), (-1.5, "(-1.5f)"), (1e-6, "1e-06f")])
def test_constants(number: float, code: str) -> None:
    assert constant(number) == code


def test_no_constants() -> None:
    with pytest.raises(SourceError, match="nan"):
        constant(float("nan"))


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
