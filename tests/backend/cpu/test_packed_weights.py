"""Packed weights: up to date with the weights, limited in size, and freed with them."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from hf_spec.backend.cpu import packed_weights
from hf_spec.backend.cpu.packed_gemm import served
from hf_spec.backend.cpu.packed_weights import (
    clear_cpu_packing,
    cpu_packing_bytes,
    packed_weights_of,
    set_cpu_packing,
)
from hf_spec.common.errors import OptionError
from hf_spec.engine.fast.packed_linear import install_packed_linears
from tests.tied_linears import WIDTH, Tied, assert_same, nothing_packed, run, run_fast


@pytest.fixture(autouse=True)
def clean_store() -> Iterator[None]:
    with nothing_packed():
        yield


@pytest.fixture
def model() -> Tied:
    torch.manual_seed(0)
    return Tied()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [256, 257])
def test_no_change_of_one_bit_goes_unseen(dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(300, width).to(dtype)
    bits = weight.view(torch.int32 if dtype == torch.float32 else torch.int16)
    stamps = {packed_weights._stamp(weight)}
    changed = [(0, 0, 0), (299, width - 1, 0), (7, 3, 1), (7, 3, 9), (150, width // 2, 14)]
    for row, column, bit in changed:
        bits.data[row, column] ^= 1 << bit
        stamps.add(packed_weights._stamp(weight))
    assert len(stamps) == len(changed) + 1


def test_unchanged_weights_are_packed_once(model: Tied, monkeypatch: pytest.MonkeyPatch) -> None:
    packed_shapes = []
    original = packed_weights.pack
    run_fast(model)
    clear_cpu_packing()

    def counting(weight: Tensor) -> Tensor:
        packed_shapes.append(tuple(weight.shape))
        return original(weight)

    monkeypatch.setattr(packed_weights, "pack", counting)
    for _ in range(3):
        run_fast(model)
    assert packed_shapes == [(512, WIDTH), (WIDTH, 512), (320, WIDTH)]


def test_packed_copies_go_with_the_model(model: Tied) -> None:
    run_fast(model)
    other = Tied()
    run_fast(other)
    both = cpu_packing_bytes()
    del other
    gc.collect()
    assert cpu_packing_bytes() == both // 2


def test_auto_stops_where_memory_does(model: Tied, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(model)
    room_for_one = int(1.5 * model.up.weight.nbytes / packed_weights.MEMORY_SHARE)
    taken = cpu_packing_bytes
    monkeypatch.setattr(packed_weights, "_available_bytes", lambda: room_for_one - taken())
    # The second call has less memory available, and must not take half of the rest again.
    for _ in range(2):
        assert_same(run_fast(model), expected)
        assert taken() == model.up.weight.nbytes
    set_cpu_packing("on")
    run_fast(model)
    assert taken() > 2 * model.up.weight.nbytes


def test_available_memory_is_known_here() -> None:
    assert 1 << 20 < packed_weights._available_bytes() < 1 << 50


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(OptionError, match="unknown CPU packing mode 'fast'; choose one of auto"):
        set_cpu_packing("fast")


def test_every_shape_is_timed_once(model: Tied) -> None:
    run_fast(model)
    shapes = {key[0] for key in served}
    assert shapes == {one.weight.shape for one in model.modules() if isinstance(one, nn.Linear)}
    known = dict(served)
    run_fast(model)
    assert all(served[key] is rows for key, rows in known.items())


def test_copies_are_counted_while_another_thread_packs() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(30)))
    with install_packed_linears(model):
        packed = cpu_packing_bytes()
    switch_interval = sys.getswitchinterval()

    def pack() -> None:
        for _ in range(40):
            with install_packed_linears(model):
                pass

    thread = threading.Thread(target=pack)
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        while thread.is_alive():
            assert 0 < cpu_packing_bytes() <= packed
    finally:
        thread.join()
        sys.setswitchinterval(switch_interval)


def test_copies_are_found_by_their_weight(model: Tied) -> None:
    assert packed_weights_of(model.up.weight) is None
    run_fast(model)
    copies = packed_weights_of(model.up.weight)
    assert copies is not None
    assert copies.all == [copies.exact]
    assert packed_weights_of(nn.Parameter(model.up.weight.detach().clone())) is None
