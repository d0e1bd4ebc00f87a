"""Packed linear layers: same values, unchanged modules, and no stale weights."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hf_spec_kernels.packed_linear import PackedWeight
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune

from hf_spec.backend.cpu import packed_gemm, packed_weights
from hf_spec.backend.cpu.packed_gemm import EVERY_ROW, NO_LIMIT, Rows, form_of, pack
from hf_spec.backend.cpu.packed_weights import (
    PackedForms,
    clear_cpu_packing,
    cpu_packing_bytes,
    set_cpu_packing,
)
from hf_spec.engine.fast import packed_linear as cpu_linear
from hf_spec.engine.fast.packed_linear import (
    PackedLinears,
    install_packed_linears,
    kernel_weight,
    use_packed_linears,
)
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.tied_linears import WIDTH, Tied, assert_same, nothing_packed, run, run_fast

# Few rows, the edges of the transposed form, a prompt.
ROWS = (0, 1, 2, 3, 4, 16, 48, 49, 64, 300)
# Sums of 256 products of size 1 / 16: rounding differs with the order of summation.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}


def patched(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if "forward" in module.__dict__]


@pytest.fixture(autouse=True)
def clean_store() -> Iterator[None]:
    with nothing_packed():
        yield
    assert not cpu_linear._forwards._installed


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[nn.Linear]:
    """Record the module of each call that uses packed weights."""
    calls: list[nn.Linear] = []

    class Counting(cpu_linear._PackedForward):
        def bind(self, copies: PackedForms | None) -> None:
            super().bind(copies)
            self._forms.rows = EVERY_ROW

        def __call__(self, input: Tensor) -> Tensor:  # noqa: A002
            calls.append(self._module)
            return super().__call__(input)

    monkeypatch.setattr(cpu_linear, "_PackedForward", Counting)
    return calls


def change_in_place(model: Tied) -> None:
    with torch.no_grad():
        model.up.weight.mul_(2)


def change_through_data(model: Tied) -> None:
    model.up.weight.data += 1


def change_one_element_through_data(model: Tied) -> None:
    model.head.weight.data[3, 5] = 7


def permute_rows_through_data(model: Tied) -> None:
    weight = model.up.weight.data
    weight.copy_(weight.flip(0))


def permute_columns_through_data(model: Tied) -> None:
    weight = model.up.weight.data
    weight.copy_(weight.roll(2, dims=1))


def swap_two_rows_through_data(model: Tied) -> None:
    weight = model.head.weight.data
    weight[[3, 9]] = weight[[9, 3]]


def flip_all_signs_through_data(model: Tied) -> None:
    model.up.weight.data.neg_()


def swap_two_columns_through_data(model: Tied) -> None:
    weight = model.head.weight.data
    weight[:, [2, 3]] = weight[:, [3, 2]]


def change_data(model: Tied) -> None:
    model.up.weight.data = model.up.weight.data * 2


def change_parameter(model: Tied) -> None:
    model.up.weight = nn.Parameter(model.up.weight.detach() * 2)


def change_state_dict(model: Tied) -> None:
    torch.manual_seed(7)
    model.load_state_dict(Tied().state_dict())


def change_tied_embedding(model: Tied) -> None:
    with torch.no_grad():
        model.embedding.weight[5].zero_()


def change_dtype(model: Tied) -> None:
    model.to(torch.bfloat16)


@pytest.mark.parametrize(
    "change",
    [
        change_in_place,
        change_through_data,
        change_one_element_through_data,
        permute_rows_through_data,
        permute_columns_through_data,
        swap_two_rows_through_data,
        swap_two_columns_through_data,
        flip_all_signs_through_data,
        change_data,
        change_parameter,
        change_state_dict,
        change_tied_embedding,
        change_dtype,
    ],
)
def test_changed_weights_are_packed_again(
    model: Tied, change: object, packed_calls: list[nn.Linear]
) -> None:
    old = run_fast(model)
    change(model)  # type: ignore[operator]
    expected = run(model)
    assert not torch.allclose(old.float(), expected.float(), rtol=1e-4, atol=1e-4)
    tolerance = TOLERANCE[expected.dtype] * 10
    torch.testing.assert_close(run_fast(model), expected, rtol=0.02, atol=tolerance)
    # Weights are not packed in a dtype for which the machine has no packed form.
    linears = (model.up, model.down, model.head)
    again = linears if form_of(expected.dtype) else ()
    assert len(packed_calls) == len(linears) + len(again)
    assert cpu_packing_bytes() == sum(linear.weight.nbytes for linear in again)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", ["auto", "off"])
def test_values_are_those_of_linear(dtype: torch.dtype, bias: bool, mode: str) -> None:
    torch.manual_seed(0)
    set_cpu_packing(mode)
    linear = nn.Linear(WIDTH, 320, bias=bias).to(dtype)
    with torch.no_grad(), install_packed_linears(linear), use_packed_linears():
        for rows in ROWS:
            for x in (torch.randn(1, rows, WIDTH), torch.randn(rows, WIDTH)):
                expected = F.linear(x.to(dtype), linear.weight, linear.bias)
                output = linear(x.to(dtype))
                assert output.shape == expected.shape
                assert output.dtype == dtype
                assert output.is_contiguous()
                torch.testing.assert_close(output, expected, rtol=0.02, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_input_may_have_any_strides_and_dimensions(mode: str) -> None:
    torch.manual_seed(0)
    set_cpu_packing(mode)
    linear = nn.Linear(WIDTH, 320)
    inputs = [
        torch.randn(WIDTH),
        torch.randn(2, 3, 4, WIDTH),
        torch.randn(WIDTH, 5).T,
        torch.randn(5, 2 * WIDTH)[:, ::2],
        torch.randn(3, WIDTH)[:, None].expand(3, 4, WIDTH),
        torch.randn(4, WIDTH + 1)[:, 1:],
    ]
    with torch.no_grad(), install_packed_linears(linear), use_packed_linears():
        for x in inputs:
            torch.testing.assert_close(linear(x), F.linear(x, linear.weight, linear.bias))


def test_every_linear_is_packed_and_the_head_too(
    model: Tied, packed_calls: list[nn.Linear]
) -> None:
    expected = run(model)
    assert_same(run_fast(model), expected)
    assert packed_calls == [model.up, model.down, model.head]
    assert cpu_packing_bytes() == sum(m.weight.nbytes for m in (model.up, model.down, model.head))


def test_modules_are_as_found_after_the_block_and_after_an_exception(model: Tied) -> None:
    before = [dict(module.__dict__) for module in model.modules()]
    with install_packed_linears(model), use_packed_linears():
        assert patched(model) == ["up", "down", "head"]
    assert [dict(module.__dict__) for module in model.modules()] == before
    with pytest.raises(KeyboardInterrupt), install_packed_linears(model):
        raise KeyboardInterrupt
    assert [dict(module.__dict__) for module in model.modules()] == before
    assert torch.equal(run(model), run(model))


def test_an_abandoned_generator_restores(model: Tied) -> None:
    def stream() -> Iterator[int]:
        with install_packed_linears(model), use_packed_linears():
            yield 1
            yield 2

    generator = stream()
    next(generator)
    assert patched(model)
    generator.close()
    assert not patched(model)


def test_a_failure_while_packing_restores(model: Tied, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cpu_linear, "_transposed_forward", fail)
    set_cpu_packing("off")
    with pytest.raises(MemoryError), install_packed_linears(model):
        pass
    assert not patched(model)


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_blocks_may_overlap_on_shared_modules(model: Tied, first_to_leave: int) -> None:
    draft = nn.Sequential(model.up, model.down)
    blocks = [install_packed_linears(model), install_packed_linears(draft)]
    for block in blocks:
        block.__enter__()
    shared_forward = model.up.forward
    blocks.pop(first_to_leave).__exit__(None, None, None)
    assert model.up.forward is shared_forward
    blocks.pop().__exit__(None, None, None)
    assert not patched(model)


def test_threads_may_share_a_model(model: Tied) -> None:
    expected = run(model)
    results: list[Tensor] = []
    threads = [
        threading.Thread(target=lambda: results.extend(run_fast(model) for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    for result in results:
        assert_same(result, expected)
    assert not patched(model)


def test_a_forward_set_by_others_is_left_alone(model: Tied) -> None:
    def theirs(x: Tensor) -> Tensor:
        return torch.zeros(*x.shape[:-1], 512)

    model.up.forward = theirs  # type: ignore[method-assign]
    with install_packed_linears(model), use_packed_linears():
        assert model.up.forward is theirs
        assert patched(model) == ["up", "down", "head"]
    assert patched(model) == ["up"]


def test_a_forward_set_meanwhile_survives(model: Tied) -> None:
    def theirs(x: Tensor) -> Tensor:
        return x

    with install_packed_linears(model), use_packed_linears():
        model.up.forward = theirs  # type: ignore[method-assign]
    assert model.up.__dict__["forward"] is theirs


def test_hooks_still_run(model: Tied) -> None:
    seen = []
    model.up.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    run_fast(model)
    assert seen == [(1, 8, 512)]


class Subclassed(nn.Linear):
    """Subclass of a linear layer, like quantized layers."""


def pruned() -> nn.Module:
    linear = nn.Linear(WIDTH, 320)
    prune.l1_unstructured(linear, "weight", amount=0.5)
    return linear


def parametrized() -> nn.Module:
    return parametrizations.weight_norm(nn.Linear(WIDTH, 320))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Subclassed(WIDTH, 320),
        lambda: nn.Linear(WIDTH, 320, dtype=torch.float64),
        lambda: nn.Linear(WIDTH, 320, device="meta"),
        lambda: nn.Linear(8, 8),
        pruned,
        parametrized,
    ],
)
def test_unsuitable_modules_are_left_alone(make: object) -> None:
    module = make()  # type: ignore[operator]
    with install_packed_linears(module), use_packed_linears():
        assert not patched(module)
    assert cpu_packing_bytes() == 0


def test_gradients_flow_inside_the_block(model: Tied) -> None:
    with install_packed_linears(model), use_packed_linears():
        model(torch.arange(8)[None]).sum().backward()
    assert model.up.weight.grad is not None
    assert model.head.weight.grad is not None


def test_autocast_is_left_alone(model: Tied) -> None:
    with torch.autocast("cpu", torch.bfloat16), install_packed_linears(model):
        assert not patched(model)


@pytest.mark.parametrize("mode", ["on", "off"])
def test_autocast_that_begins_inside_is_left_alone(model: Tied, mode: str) -> None:
    """This occurs in a model that accelerate prepared for mixed precision."""
    set_cpu_packing(mode)
    ids, half = torch.arange(8)[None], torch.autocast("cpu", torch.bfloat16)
    with torch.no_grad(), half:
        expected = model(ids)
    with install_packed_linears(model), use_packed_linears(), torch.no_grad(), half:
        found = model(ids)
    assert found.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(found, expected)


def test_weights_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = Tied()
        expected = run(model)
        assert_same(run_fast(model), expected)
    assert_same(run_fast(model), expected)


def test_errors_of_a_wrong_input_stay(model: Tied) -> None:
    with install_packed_linears(model), use_packed_linears(), torch.no_grad():
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.up(torch.randn(8, WIDTH // 2))
        with pytest.raises(RuntimeError, match="dtype"):
            model.up(torch.randn(8, WIDTH, dtype=torch.float64))


def test_off_frees_the_copies_and_uses_the_form_without(
    model: Tied, packed_calls: list[nn.Linear]
) -> None:
    expected = run(model)
    run_fast(model)
    set_cpu_packing("off")
    assert cpu_packing_bytes() == 0
    packed_calls.clear()
    assert_same(run_fast(model), expected)
    assert packed_calls == []
    assert cpu_packing_bytes() == 0


def test_other_rows_are_left_to_linear() -> None:
    linear = nn.Linear(WIDTH, 320)
    poisoned = pack(torch.full_like(linear.weight, 1e6))
    copies = PackedForms((), poisoned, rows=Rows(3, 64))
    forward = cpu_linear._PackedForward(linear, copies)
    with torch.no_grad(), use_packed_linears():
        for rows in (1, 2, 65):
            x = torch.randn(rows, WIDTH)
            assert torch.equal(forward(x), F.linear(x, linear.weight, linear.bias))
        for rows in (3, 64):
            assert forward(torch.ones(rows, WIDTH)).abs().max() > 1e6


@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (2, 1), (3,), (1, 4), (1, 7)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_few_rows_are_padded(shape: tuple[int, ...], has_bias: bool) -> None:
    linear = nn.Linear(WIDTH, 320, bias=has_bias)
    x = torch.randn(*shape, WIDTH)
    with torch.no_grad(), use_packed_linears():
        copies = PackedForms((), pack(linear.weight), rows=Rows(1, NO_LIMIT, padded=4))
        forward = cpu_linear._PackedForward(linear, copies)
        found = forward(x)
        torch.testing.assert_close(found, linear(x), atol=1e-4, rtol=0)
        # Models call `view` on the output.
        assert found.is_contiguous()
        # Each row has the same bits as in an input of four rows.
        four = F.pad(x.reshape(-1, WIDTH), (0, 0, 0, 3))[:4]
        if x.numel() // WIDTH < 4:
            assert torch.equal(found.reshape(-1, 320), forward(four)[: x.numel() // WIDTH])


@needs_compiler
def test_what_a_kernel_reads_for_a_product() -> None:
    large, small = nn.Linear(WIDTH, 320), nn.Linear(8, 8)
    assert kernel_weight(small, 5, torch.float32) is small.weight
    assert kernel_weight(small.weight, 5, torch.float32) is small.weight
    assert kernel_weight(large, 5, torch.float32) is None
    with install_packed_linears(nn.ModuleList([large, small])):
        forward = large.__dict__["forward"]
        forward._forms.rows = Rows(3, 64)
        packed = kernel_weight(large, 5, torch.float32)
        assert isinstance(packed, PackedWeight) == (form_of(torch.float32) is packed_gemm.OWN)
        # A single linear layer would leave one row to F.linear; a compiled layer does not.
        assert kernel_weight(large, 1, torch.float32) is packed
        assert kernel_weight(large, 65, torch.float32) is None


def test_a_transformers_model_keeps_its_logits(packed_calls: list[nn.Linear]) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320,
        hidden_size=WIDTH,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    for rows in (1, 6, 70):
        ids = torch.randint(0, 320, (2, rows))
        with torch.no_grad():
            expected = model(ids).logits
            with install_packed_linears(model), use_packed_linears():
                assert_same(model(ids).logits, expected)
    # k and v (128 x 256) are too small to pack; the other five layers and the head are not.
    assert len(packed_calls) == 3 * (2 * 5 + 1)


@needs_compiler
class TestRounded:
    """Weights rounded to bfloat16, for drafts only."""

    @pytest.fixture(autouse=True)
    def pays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for module in (cpu_linear, packed_gemm):
            monkeypatch.setattr(module, "rounded_rows", lambda: 64)

    @torch.no_grad()
    def drafted(self, model: nn.Module, rows: int = 8) -> Tensor:
        with install_packed_linears(model, rounded=True), use_packed_linears(rounded=True):
            return run(model, rows)

    def rounded(self, model: Tied) -> Tensor:
        """Return the model's output with only the linear layers' weights rounded to bfloat16."""
        copied = copy.deepcopy(model)
        tied = copied.head.weight = nn.Parameter(model.head.weight.bfloat16().float())
        copied.embedding.weight = nn.Parameter(model.embedding.weight.detach())
        assert not torch.equal(tied, copied.embedding.weight)
        for linear in (copied.up, copied.down):
            linear.weight = nn.Parameter(linear.weight.bfloat16().float())
        return run(copied)

    def test_drafts_are(self, model: Tied) -> None:
        found, expected = self.drafted(model), run(model)
        # CPUs with bfloat16 matmuls round the states as well.
        assert (found - self.rounded(model)).norm() < 0.01 * expected.norm()
        assert 1e-4 * expected.norm() < (found - expected).norm()
        exact = sum(one.weight.nbytes for one in (model.up, model.down, model.head))
        assert cpu_packing_bytes() < 0.6 * exact

    def test_what_others_compute_with_the_same_modules_is_not(self, model: Tied) -> None:
        expected, drafted = run(model), self.drafted(model)
        clear_cpu_packing()
        for first, second in ((True, False), (False, True)):
            with install_packed_linears(model, first), install_packed_linears(model, second):
                with torch.no_grad(), use_packed_linears(rounded=True):
                    assert torch.equal(run(model), drafted)
                    with use_packed_linears():
                        assert_same(run(model), expected)
                    assert torch.equal(run(model), drafted)
                assert torch.equal(run(model), expected)
            clear_cpu_packing()

    def test_a_block_of_its_own_for_each(self, model: Tied, packed_calls: list[nn.Linear]) -> None:
        """Packed weights stay cached, and each block finds those that it needs."""
        expected = run(model)
        for _ in range(2):
            drafted = self.drafted(model)
            assert_same(run_fast(model), expected)
        assert not torch.equal(drafted, expected)
        assert len(packed_calls) == 4 * 3
        kept = cpu_packing_bytes()
        self.drafted(model)
        assert cpu_packing_bytes() == kept

    def test_changed_weights_are_rounded_again(self, model: Tied) -> None:
        before = self.drafted(model)
        model.up.weight.data.neg_()
        after = self.drafted(model)
        assert not torch.allclose(before, after, atol=1.0)
        assert (after - self.rounded(model)).norm() < 0.01 * after.norm()

    def test_more_rows_than_pay_are_exact_where_that_can_be(self, model: Tied) -> None:
        with install_packed_linears(model):
            assert_same(self.drafted(model, 65), run(model, 65))
            assert not torch.equal(self.drafted(model, 64), run(model, 64))
        clear_cpu_packing()
        found, expected = self.drafted(model, 65), run(model, 65)
        assert 1e-4 * expected.norm() < (found - expected).norm()

    def test_nothing_is_where_it_does_not_pay(
        self, model: Tied, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(packed_gemm, "rounded_rows", lambda: 0)
        assert_same(self.drafted(model), run(model))
        assert cpu_packing_bytes() >= model.up.weight.nbytes

    def test_bfloat16_is_as_it_is(self) -> None:
        model = Tied().bfloat16()
        assert torch.equal(self.drafted(model), run_fast(model))

    @pytest.mark.by_default(strategy=("tree", "falcon"))
    @pytest.mark.parametrize(
        "strategy",
        ["draft", "tree", "falcon", "eagle", "block", "heads", "disco", "gemma_assistant"],
    )
    def test_it_reaches_no_target(self, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Drafts read rounded weights that are nonsense, and the output does not change."""
        nonsense, used = [], []

        def spoiled(weight: Tensor) -> object:
            nonsense.append(pack(torch.full_like(weight, 7.0)))
            return nonsense[-1]

        def product(states: Tensor, packed: Any, *rest: Any) -> Tensor:
            used.extend(one for one in nonsense if one is packed)
            return packed_gemm.gemm(states, packed, *rest)

        monkeypatch.setattr(cpu_linear, "MIN_WEIGHT_ELEMENTS", 1)
        monkeypatch.setattr(packed_weights, "pack_rounded", spoiled)
        monkeypatch.setattr(cpu_linear, "gemm", product)
        model, prompt = tiny_models.build("llama"), tiny_models.settled_prompt("llama")
        call = {"max_new_tokens": 12, "do_sample": False}
        plain = model.generate(prompt, **call)
        found = model.generate(prompt, **call, **tiny_models.speculation("llama", strategy))
        assert torch.equal(found, plain)
        assert used


@torch.no_grad()
def test_a_session_inside_another_sees_every_change(
    model: Tied, packed_calls: list[nn.Linear]
) -> None:
    """The outer session has just compared the weights when the inner one begins."""
    x = torch.randn(8, WIDTH)

    def run_once(linears: PackedLinears) -> Tensor:
        linears.refresh()
        with use_packed_linears():
            return model.up(x)

    with install_packed_linears(model) as outer:
        for change in (change_in_place, change_through_data) * 2:
            before = run_once(outer)
            change(model)
            with install_packed_linears(model) as inner:
                changed = run_once(inner)
                assert_same(changed, F.linear(x, model.up.weight, model.up.bias))
                assert not torch.allclose(changed, before)
            change(model)
            assert_same(run_once(outer), F.linear(x, model.up.weight, model.up.bias))
    assert packed_calls


def replace_weight(model: Tied) -> None:
    model.up.weight = nn.Parameter(-model.up.weight)


@torch.no_grad()
@pytest.mark.parametrize("change", [change_in_place, replace_weight])
def test_a_change_is_seen_before_the_next_pass(change: Callable[[Tied], None], model: Tied) -> None:
    x = torch.randn(8, WIDTH)
    with install_packed_linears(model) as linears, use_packed_linears():
        linears.refresh()
        change(model)
        linears.refresh()
        assert_same(model.up(x), F.linear(x, model.up.weight, model.up.bias))
