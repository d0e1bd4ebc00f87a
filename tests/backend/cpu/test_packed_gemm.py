"""Forms of GEMMs with packed weights: which ones are available, and when each is used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hf_spec_kernels import launches
from hf_spec_kernels.packed_linear import BuildError, PackedWeight
from torch import Tensor, nn
from torch.nn import functional as F

from hf_spec.backend.cpu import packed_gemm
from hf_spec.backend.cpu.packed_gemm import (
    EVERY_ROW,
    NO_LIMIT,
    ONEDNN,
    OWN,
    Form,
    form_of,
    gemm,
    obstacle,
    pack,
    packed_rows,
    padded_gemm,
)
from hf_spec.backend.cpu.packed_weights import clear_cpu_packing, cpu_packing_bytes
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from tests.compiler import needs_compiler

WIDTH = 256


@pytest.fixture(autouse=True)
def nothing_is_packed() -> Iterator[None]:
    clear_cpu_packing()
    yield
    clear_cpu_packing()


@pytest.fixture
def undecided() -> Iterator[None]:
    """Clear the cached choices of forms, and of the numbers of rows that they run."""

    def forget() -> None:
        form_of.cache_clear()
        packed_gemm.served.clear()
        packed_gemm._most_rows.cache_clear()

    forget()
    yield
    forget()


def refuse(weight: Tensor) -> Tensor:
    raise BuildError("no C++ compiler was found")


def miss(weight: Tensor) -> Tensor:
    raise AttributeError("no operator _reorder_linear_weight")


def broken(form: Form, fault: str) -> Form:
    """Return a form that cannot pack, or packs another weight."""
    if fault == "wrong":
        return Form(form.name, lambda weight: form.pack(weight * 2), form.gemm)
    return Form(form.name, refuse if form is OWN else miss, form.gemm)


def fast(linear: nn.Linear, states: Tensor) -> Tensor:
    with torch.no_grad(), install_packed_linears(linear), use_packed_linears():
        return linear(states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", [OWN, ONEDNN], ids=["own", "oneDNN"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_both_forms_compute_a_linear_layer(form: Form, dtype: torch.dtype, has_bias: bool) -> None:
    if packed_gemm.obstacle(form, dtype) is not None:
        pytest.skip("not on this processor")
    torch.manual_seed(0)
    weight, bias = torch.randn(100, WIDTH).to(dtype), torch.randn(100).to(dtype)
    packed, added = form.pack(weight), bias if has_bias else None
    for shape in [(1,), (3, 7), (2, 20), (1, 300)]:
        states = torch.randn(*shape, WIDTH).to(dtype)
        found, expected = gemm(states, packed, added), F.linear(states, weight, added)
        assert (found.shape, found.dtype) == (expected.shape, dtype)
        # Sums of 256 products of about 1, rounded at the end.
        close = 1e-3 if dtype == torch.float32 else 0.3
        torch.testing.assert_close(found, expected, rtol=0, atol=close)
        if len(shape) > 1:
            found = padded_gemm(states[:, :2], packed, added)
            torch.testing.assert_close(found, expected[:, :2], rtol=0, atol=close)


@needs_compiler
@pytest.mark.parametrize("fault", ["missing", "wrong"])
@pytest.mark.parametrize("form", [OWN, ONEDNN], ids=["own", "oneDNN"])
def test_the_other_form_serves_where_one_is_broken(
    form: Form,
    fault: str,
    undecided: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    linear, states = nn.Linear(WIDTH, 512), torch.randn(3, WIDTH)
    other = ONEDNN if form is OWN else OWN
    with monkeypatch.context() as patch, caplog.at_level("INFO"):
        patch.setattr(packed_gemm, "FORMS", (broken(form, fault), other))
        for _ in range(3):
            torch.testing.assert_close(fast(linear, states), linear(states), rtol=1e-4, atol=1e-5)
        assert form_of(torch.float32) is other
    assert cpu_packing_bytes() >= linear.weight.nbytes
    assert caplog.text.count("not packed for the CPU by " + form.name) == 1
    assert "WARNING" not in caplog.text


@pytest.mark.parametrize("fault", ["missing", "wrong"])
def test_without_any_form_products_are_as_without_packing(
    fault: str, undecided: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    linear, states = nn.Linear(WIDTH, 512), torch.randn(3, WIDTH)
    forms = broken(OWN, fault), broken(ONEDNN, fault)
    with monkeypatch.context() as patch, caplog.at_level("WARNING"):
        patch.setattr(packed_gemm, "FORMS", forms)
        for _ in range(3):
            assert torch.equal(fast(linear, states), linear(states))
    assert cpu_packing_bytes() == 0
    assert caplog.text.count("not packed for the CPU") == 2


@needs_compiler
@pytest.mark.parametrize("faster", [OWN, ONEDNN], ids=["own", "oneDNN"])
def test_the_faster_form_is_taken(
    faster: Form, undecided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(states: Tensor, *forms: packed_gemm._Timed) -> list[float]:
        return [len(states) / (2.0 if run is faster.gemm else 1.0) for run, _ in forms]

    monkeypatch.setattr(packed_gemm, "fastest_seconds", seconds)
    assert form_of(torch.float32) is faster
    assert isinstance(pack(torch.randn(32, 64)), PackedWeight) == (faster is OWN)


@needs_compiler
def test_in_bfloat16_our_kernel_serves_every_number_of_rows(
    undecided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the faster form ran each number of rows, the bits would depend on that number."""

    def seconds(states: Tensor, *forms: packed_gemm._Timed) -> list[float]:
        return [2.0 if run is OWN.gemm else 1.0 for run, _ in forms]

    monkeypatch.setattr(packed_gemm, "fastest_seconds", seconds)
    weight = torch.randn(320, WIDTH).bfloat16()
    assert form_of(torch.bfloat16) is OWN
    assert packed_rows(weight, [(weight, pack(weight))]) == EVERY_ROW
    small = nn.Linear(8, 8).bfloat16()
    before = launches["packed_linear"]
    fast(small, torch.randn(3, 8).bfloat16())
    assert launches["packed_linear"] > before


@needs_compiler
def test_the_kernel_runs_where_it_is_taken(
    undecided: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_gemm, "FORMS", (OWN,))
    linear = nn.Linear(WIDTH, 512)
    fast(linear, torch.randn(3, WIDTH))
    before = launches["packed_linear"]
    fast(linear, torch.randn(3, WIDTH))
    assert launches["packed_linear"] == before + 1


@pytest.mark.parametrize(
    ("winning", "padded", "served"),
    [
        ({1, 2, 256}, 1.0, (1, NO_LIMIT, 1)),
        ({2, 256}, 1.0, (2, NO_LIMIT, 1)),
        ({1, 2}, 1.0, (1, 64, 1)),
        (set(), 1.0, (3, 64, 1)),
        (set(), 0.8, (1, 64, 4)),
        ({1, 256}, 0.8, (1, NO_LIMIT, 4)),
    ],
)
def test_the_fastest_form_serves(
    winning: set[int],
    padded: float,
    served: tuple[int, ...],
    undecided: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def seconds(states: Tensor, *forms: object) -> list[float]:
        return [1.0, 1.0 if len(states) in winning else 2.0, padded][: len(forms)]

    weight = torch.randn(320, WIDTH)
    if obstacle(ONEDNN, weight.dtype) is not None:
        pytest.skip("oneDNN packs no weights here")
    monkeypatch.setattr(packed_gemm, "FORMS", (ONEDNN,))
    copy = pack(weight)
    monkeypatch.setattr(packed_gemm, "fastest_seconds", seconds)
    found = packed_rows(weight, [(weight, copy)])
    assert (found.least, found.most, found.padded) == served


@needs_compiler
def test_our_kernel_pads_no_rows(undecided: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row is faster than several in our kernel, even if a noisy measurement differs."""
    monkeypatch.setattr(packed_gemm, "FORMS", (OWN,))
    weight = torch.randn(320, WIDTH)
    copy = pack(weight)
    monkeypatch.setattr(packed_gemm, "fastest_seconds", lambda *_: [1.0, 1.0, 0.1][:2])
    assert packed_rows(weight, [(weight, copy)]).padded == 1
