"""Recording on a device of its own, and the switch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_spec.backend.device.capture import capture_stream, recording, set_cuda_graphs
from hf_spec.common.errors import OptionError


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The streams on which PyTorch records, on a machine without a GPU."""
    found = []

    class Recording(torch.cuda.graph):
        def __enter__(self) -> None:
            found.append(self.capture_stream)

        def __exit__(self, *_: object) -> None:
            """Nothing was recorded."""

    def stream(device: Any = None) -> Any:
        # Without a device that of the current one.
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
    """PyTorch takes for all devices the stream of the first one."""
    devices = [torch.device("cuda", index) for index in (0, 1, 0)]
    for device in devices:
        with recording(device, (0, 1)):
            pass
    assert [stream.device for stream in used] == devices
    assert used[0] is used[2]


def test_an_unknown_mode() -> None:
    with pytest.raises(OptionError, match="unknown CUDA graph mode 'on'; choose one of auto"):
        set_cuda_graphs("on")
