"""CUDA graph capture per device, operations that make the host wait, and the mode switch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_spec.backend.device.capture import (
    NoWaits,
    WaitError,
    capture_stream,
    recording,
    set_cuda_graphs,
)
from hf_spec.common.errors import OptionError

HERE = torch.device("cpu")
WAITS: dict[str, Callable[[torch.Tensor], Any]] = {
    "_local_scalar_dense": lambda ones: float(ones.sum()),
    "nonzero": lambda ones: ones.nonzero(),
    "index": lambda ones: ones[ones > 0],
    "index_put_": lambda ones: ones.index_put_((ones > 0,), ones[0]),
    "multinomial": lambda ones: torch.multinomial(ones, 1),
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
    ones, places = torch.ones(3), torch.tensor([0, 2])
    with NoWaits(HERE):
        total = (ones @ ones.to(torch.float64).float() + ones[places].sum()).half()
        ones.index_put_((places,), ones[places])
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
