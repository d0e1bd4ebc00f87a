"""CUDA graph capture per device, operations that make the host wait, and the mode switch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 - it registers `grouped_mm_fallback`

from hf_spec.backend.device.capture import (
    NoWaits,
    WaitError,
    capture_stream,
    grouped_mm_waits,
    recording,
    set_cuda_graphs,
)
from hf_spec.common.errors import OptionError

HERE = torch.device("cpu")
# Sizes of groups and the index where each ends.
REPEATS, ENDS = torch.tensor([1, 0, 2]), torch.tensor([1, 3], dtype=torch.int32)


def grouped_mm(operation: Callable[..., Any], *ends: torch.Tensor) -> Any:
    """Multiply two groups of rows, or two matrices if no ends are given, in bfloat16."""
    states = torch.ones(3, 16) if ends else torch.ones(2, 3, 16)
    return operation(states.bfloat16(), torch.ones(2, 16, 8).bfloat16(), *ends)


WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "_local_scalar_dense": lambda ones: float(ones.sum()),
    "nonzero": lambda ones: ones.nonzero(),
    "index": lambda ones: ones[ones > 0],
    "index_put_": lambda ones: ones.index_put_((ones > 0,), ones[0]),
    "multinomial": lambda ones: torch.multinomial(ones, 1),
    "bincount": lambda ones: ones.long().bincount(),
    "repeat_interleave": lambda ones: ones.repeat_interleave(REPEATS),
    "_grouped_mm": lambda _: grouped_mm(torch._grouped_mm, ENDS),
    "grouped_mm_fallback": lambda _: grouped_mm(torch.ops.transformers.grouped_mm_fallback, ENDS),
    "equal": lambda ones: torch.equal(ones, ones),
    "_to_copy": lambda ones: ones.to("meta"),
}


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Return the list of streams on which PyTorch captures, with CUDA replaced by fakes."""
    found = []

    class Recording(torch.cuda.graph):
        def __enter__(self) -> None:
            found.append(self.capture_stream)

        def __exit__(self, *_: object) -> None:
            """Do nothing, since nothing was captured."""

    def stream(device: Any = None) -> Any:
        # The default is the current device.
        return SimpleNamespace(device=torch.device("cuda", 0) if device is None else device)

    monkeypatch.setattr(torch.cuda, "graph", Recording)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    capture_stream.cache_clear()
    yield found
    capture_stream.cache_clear()


def test_every_device_records_on_a_stream_of_its_own(used: list[Any]) -> None:
    """PyTorch itself uses the stream of the first device for all devices."""
    devices = [torch.device("cuda", index) for index in (0, 1, 0)]
    for device in devices:
        with recording(device, (0, 1)):
            pass
    assert [stream.device for stream in used] == devices
    assert used[0] is used[2]


def test_an_unknown_mode() -> None:
    with pytest.raises(OptionError, match="unknown CUDA graph mode 'on'; choose one of auto"):
        set_cuda_graphs("on")


@pytest.mark.parametrize("name", WAITS)
def test_what_waits_is_refused(name: str) -> None:
    ones = torch.ones(3)
    with NoWaits(HERE), pytest.raises(WaitError, match=f"^{name} makes the host wait for the cpu"):
        WAITS[name](ones)
    WAITS[name](ones)


def test_everything_else_runs() -> None:
    ones, index = torch.ones(3), torch.tensor([0, 2])
    with NoWaits(HERE):
        total = (ones @ ones.to(torch.float64).float() + ones[index].sum()).half()
        ones.index_put_((index,), ones[index])
        assert ones.repeat_interleave(2).shape == (6,)
        assert ones.repeat_interleave(REPEATS, output_size=3).shape == (3,)
        grouped_mm(torch._grouped_mm)
    assert float(total) == 5


def test_another_device_may_be_waited_for() -> None:
    with NoWaits(torch.device("meta")):
        assert float(torch.ones(3).sum()) == 3
        torch.ones(3).copy_(torch.zeros(3))


def test_copies_to_a_device_wait_unless_asked_not_to() -> None:
    there = torch.ones(3, device="meta")
    with NoWaits(there.device):
        for copy in (lambda: torch.ones(3).to("meta"), lambda: there.copy_(torch.ones(3))):
            with pytest.raises(WaitError, match=r"copy_? makes the host wait for the meta"):
                copy()
        torch.ones(3).to("meta", non_blocking=True)
        there.half().copy_(there)


def test_indices_and_values_of_another_device_are_copied_first() -> None:
    there, index = torch.ones(3, device="meta"), torch.tensor([0, 2])
    values = torch.zeros(2, device="meta")
    waits: dict[str, Callable[[], Any]] = {
        "index": lambda: there[index],
        "index_put_": lambda: there.index_put_((index,), values),
    }
    for name, run in waits.items():
        run()
        with NoWaits(there.device), pytest.raises(WaitError, match=f"^{name} makes the host wait"):
            run()
    with NoWaits(there.device):
        there[index.to("meta", non_blocking=True)]
        torch.ones(3)[index]
    with NoWaits(there.device), pytest.raises(WaitError, match=r"^index_put_ makes the host wait"):
        there.index_put_((index.to("meta", non_blocking=True),), torch.tensor(0.0))


@pytest.mark.parametrize(
    ("dtype", "capability", "waits"),
    [
        (torch.bfloat16, (9, 0), False),
        (torch.bfloat16, (10, 3), False),
        (torch.bfloat16, (8, 9), True),
        (torch.bfloat16, (12, 0), True),
        (torch.float16, (9, 0), True),
    ],
)
def test_where_pytorch_multiplies_groups_by_one_kernel(
    dtype: torch.dtype, capability: Any, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    states: Any = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype)
    assert grouped_mm_waits(states) == waits
