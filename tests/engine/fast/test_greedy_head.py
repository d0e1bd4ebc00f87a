"""LM heads that compute only the best logits if nothing else reads or changes the logits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_spec.backend.cpu import packed_gemm, packed_weights, screened_weight
from hf_spec.engine.fast.greedy_head import GreedyHead
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.tied_linears import nothing_packed

pytestmark = needs_compiler


@pytest.fixture(autouse=True)
def always_screened(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Screen heads of any size, from their second pass on, regardless of timings."""
    monkeypatch.setattr("hf_spec.engine.fast.packed_linear.MIN_WEIGHT_ELEMENTS", 1)
    monkeypatch.setattr(packed_weights, "MIN_ELEMENTS", 1)
    monkeypatch.setattr(packed_weights, "SCREENED_FROM", 1)
    monkeypatch.setattr(screened_weight, "MOST_BLOCKS", 1.0)
    monkeypatch.setattr(packed_weights, "timed", lambda weight, _: replace(weight, most_rows=16))
    monkeypatch.setattr(packed_gemm, "SAME_BITS", {torch.bfloat16, torch.float32})
    with nothing_packed():
        packed_gemm.form_of.cache_clear()
        packed_gemm.served.clear()
        yield
    packed_gemm.form_of.cache_clear()
    packed_gemm.served.clear()


@pytest.fixture
def screened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of rows of each matmul that computes only the best outputs."""
    rows: list[int] = []
    best = screened_weight.ScreenedWeight.best

    def note(self: Any, states: Tensor) -> Tensor | None:
        found = best(self, states)
        rows.extend([] if found is None else [len(states)])
        return found

    monkeypatch.setattr(screened_weight.ScreenedWeight, "best", note)
    return rows


def call(name: str, **options: Any) -> dict[str, Any]:
    return {**tiny_models.prompts(name, "one"), "max_new_tokens": 20, "do_sample": False, **options}


def model_of(name: str) -> Any:
    return copy.deepcopy(tiny_models.build(name))


@pytest.mark.parametrize("strategy", ["none", "lookup", "tree", "falcon"])
def test_output_is_that_of_plain_generate(strategy: str, screened: list[int]) -> None:
    model = model_of("llama")
    given = call("llama")
    found = model.generate(**given, **tiny_models.speculation("llama", strategy))
    assert torch.equal(found, model.generate(**given))
    assert screened


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"output_scores": True, "return_dict_in_generate": True},
        {"output_logits": True, "return_dict_in_generate": True},
        {"do_sample": True},
    ],
    ids=["a processor", "scores", "logits", "sampling"],
)
def test_where_others_are_read_all_are_computed(
    options: dict[str, Any], screened: list[int]
) -> None:
    model_of("llama").generate(**call("llama", **options), spec_strategy="lookup")
    assert not screened


def test_logits_that_the_model_changes_are_computed_whole(screened: list[int]) -> None:
    """A softcap may make two outputs equal."""
    model, given = model_of("gemma2"), call("gemma2")
    found = model.generate(**given, spec_strategy="lookup")
    assert torch.equal(found, model.generate(**given))
    assert not screened


@pytest.mark.parametrize("hooked", ["head", "model", "every module"])
def test_hooks_see_all_logits(hooked: str, screened: list[int]) -> None:
    model = model_of("llama")
    seen: list[bool] = []

    def look(module: nn.Module, given: Any, output: Any) -> None:
        logits = getattr(output, "logits", output)
        if isinstance(logits, Tensor):
            seen.append(bool(logits.isfinite().all()))

    if hooked == "every module":
        handle = nn.modules.module.register_module_forward_hook(look)
    else:
        handle = (model.lm_head if hooked == "head" else model).register_forward_hook(look)
    with handle:
        model.generate(**call("llama"), spec_strategy="none")
    assert seen
    assert all(seen)
    assert not screened


def test_a_head_with_a_bias_is_computed_whole(screened: list[int]) -> None:
    model = model_of("llama")
    model.lm_head.bias = nn.Parameter(torch.randn(tiny_models.VOCAB))
    given = call("llama")
    assert torch.equal(model.generate(**given, spec_strategy="none"), model.generate(**given))
    assert not screened


def test_new_weights_are_used(screened: list[int]) -> None:
    model, given = model_of("llama"), call("llama")
    model.generate(**given, spec_strategy="none")
    count = len(screened)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert torch.equal(model.generate(**given, spec_strategy="none"), model.generate(**given))
    assert len(screened) > count


def test_without_packing_there_is_no_copy(screened: list[int]) -> None:
    model = model_of("llama")
    packed_weights.set_cpu_packing("off")
    try:
        model.generate(**call("llama"), spec_strategy="none")
        assert packed_weights.cpu_packing_bytes() == 0
    finally:
        packed_weights.set_cpu_packing("auto")
    assert not screened


def test_it_is_made_after_many_passes(screened: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_weights, "SCREENED_FROM", 15)
    model = model_of("llama")
    model.generate(**call("llama", max_new_tokens=12), spec_strategy="none")
    assert not screened
    before = packed_weights.cpu_packing_bytes()
    model.generate(**call("llama", max_new_tokens=12), spec_strategy="none")
    assert screened
    assert packed_weights.cpu_packing_bytes() > before


class TestConfirm:
    def head(self, output: Tensor) -> GreedyHead:
        model = model_of("llama")
        head = GreedyHead(model)
        self.linear = model.lm_head
        head.record(model.lm_head, output)
        return head

    def test_the_memory_of_the_output(self) -> None:
        output = torch.randn(1, 3, 8)
        head = self.head(output)
        assert not head.may_screen(self.linear)
        head.confirm(output[0])
        assert head.may_screen(self.linear)
        assert not head.may_screen(nn.Linear(2, 2))

    @pytest.mark.parametrize(
        "change",
        [
            lambda output: output * 1.0,
            lambda output: output[0, :2],
            lambda output: output[..., :7],
            lambda output: output.view(torch.int32),
            lambda output: output.mul_(1.0),
        ],
        ids=["a copy", "fewer rows", "fewer tokens", "another dtype", "changed in place"],
    )
    def test_anything_else_is_refused(self, change: Any) -> None:
        output = torch.randn(1, 3, 8)
        head = self.head(output)
        head.confirm(change(output))
        assert not head.may_screen(self.linear)
        head.confirm(output)
        assert not head.may_screen(self.linear), "it is decided once"

    def test_a_head_that_was_not_run(self) -> None:
        head = GreedyHead(model_of("llama"))
        head.confirm(torch.randn(1, 8))
        assert head.confirmed is False
