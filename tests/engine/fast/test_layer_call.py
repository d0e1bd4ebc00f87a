"""Compiled layer with the weights of one layer: its inputs, and calls that it does not handle."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hf_spec_kernels import using
from torch import Tensor

import hf_spec
from hf_spec.backend.cpu.packed_gemm import rounded_rows
from hf_spec.backend.cpu.packed_weights import clear_cpu_packing, packed_weights_of, set_cpu_packing
from hf_spec.engine.fast import layer_call as bound_program
from hf_spec.engine.fast.layer_call import BoundLayer
from hf_spec.engine.forward.attention_span import STEP_TOKENS
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from tests import tiny_models
from tests.compiler import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Record for every call whether the compiled layer ran."""
    found: list[bool] = []
    call = BoundLayer.__call__

    def note(self: BoundLayer, *given: Any) -> Any:
        result = call(self, *given)
        found.append(result is not None)
        return result

    monkeypatch.setattr(BoundLayer, "__call__", note)
    return found


@pytest.fixture
def target() -> Iterator[Any]:
    model = copy.deepcopy(tiny_models.build("llama"))
    hf_spec.compile(model)
    yield model
    set_cpu_packing("auto")
    clear_cpu_packing()


@torch.no_grad()
def logits(model: Any, tokens: int = 3, slots: int = 1) -> Tensor:
    runner = ModelRunner(model, slots)
    rows = [([5] * tokens, list(range(-1, tokens - 1)))] * slots
    with runner.active():
        return runner.forward(DraftTree.from_rows(rows), [[5]] * slots).logits


def test_a_prompt_is_run_by_programs_in_a_new_pool(target: Any, ran: list[bool]) -> None:
    expected = logits(target)
    hf_spec.compile(target, "off")
    assert all(ran)
    torch.testing.assert_close(logits(target), expected)
    hf_spec.compile(target)
    ran.clear()
    for _ in range(2):
        runner = ModelRunner(target, 1)
        with torch.no_grad(), runner.active():
            runner.forward(DraftTree.from_rows([([5], [-1])]), [[5]])
    assert ran == [True] * 6


def test_a_pool_that_grows_is_found(target: Any, ran: list[bool]) -> None:
    given = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 300, "do_sample": False}
    plain = target.generate(**given)
    assert torch.equal(target.generate(**given, spec_strategy="none"), plain)
    assert sum(ran) > 3 * 290


def test_other_kernels_are_left_to_the_layers(target: Any, ran: list[bool]) -> None:
    before = logits(target)
    with using("torch"):
        torch.testing.assert_close(logits(target), before)
    assert not any(ran[3:])


def test_products_without_a_kernel_are_left_to_the_layers(
    target: Any, ran: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bound_program, "kernel_weight", lambda product, rows, dtype: None)
    before = logits(target)
    ran.clear()
    torch.testing.assert_close(logits(target), before)
    assert not any(ran)


def test_prompts_run_compiled_as_steps_do(target: Any, ran: list[bool]) -> None:
    """Otherwise the bits of a token would depend on the rest of the forward pass."""
    runner = ModelRunner(target, 1)
    with torch.no_grad(), runner.active():
        runner.forward(DraftTree.from_rows([([5], [-1])]), [[5] * (STEP_TOKENS + 1)])
        assert ran == [True] * 3
        # A longer prompt runs in a separate forward pass, whose attention is not that of drafts.
        runner.restart(0)
        ran.clear()
        runner.forward(DraftTree.from_rows([([5], [-1])]), [[5] * (STEP_TOKENS + 2)])
    assert ran == [False] * 3 + [True] * 3


def test_threads_run_one_layer_on_pools_of_their_own(target: Any) -> None:
    prompts = [torch.tensor([[3 + n, 5, 7 + n]]) for n in range(4)]
    given: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False}
    plain = [target.generate(prompt, **given) for prompt in prompts]
    found: list[Any] = [None] * 4

    def answer(index: int) -> None:
        found[index] = target.generate(prompts[index], **given, spec_strategy="lookup")

    threads = [threading.Thread(target=answer, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(map(torch.equal, found, plain))


def wide_model() -> Any:
    """Return a model whose weights are large enough to be packed."""
    torch.manual_seed(0)
    llama = tiny_models.build("llama")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    return type(llama)(type(llama.config)(**llama.config.to_dict() | sizes)).eval()


def test_packed_weights_are_held_by_calls_alone() -> None:
    model = wide_model()
    hf_spec.compile(model)
    given = {"input_ids": torch.tensor([[5, 6, 7]]), "max_new_tokens": 4, "do_sample": False}
    model.generate(**given, spec_strategy="none")
    copies = packed_weights_of(model.model.layers[0].mlp.up_proj.weight)
    assert copies is not None
    held = weakref.ref(copies.exact)
    del copies
    clear_cpu_packing()
    gc.collect()
    assert held() is None


def test_drafts_read_weights_that_were_rounded_for_them() -> None:
    """Runners that may read rounded weights and those that may not have separate tables."""
    model = wide_model()
    hf_spec.compile(model)
    exact = ModelRunner(model, 1)
    drafting = ModelRunner(model, 1)
    drafting.rounded = True
    tree = DraftTree.from_rows([([5] * 3, [-1, 0, 1])])
    with torch.no_grad(), exact.active(), drafting.active():
        for text in ([5], [5, 5]):
            found = [one.forward(tree, [text]).logits for one in (exact, drafting, exact)]
            exact.keep([[]])
            drafting.keep([[]])
    apart = (found[1] - found[0]).norm() / found[0].norm()
    assert 0 < apart < 0.05 if rounded_rows() else apart == 0
    assert torch.equal(found[2], found[0])
