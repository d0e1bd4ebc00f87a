"""What makes a host wait is refused, whatever else runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_spec.backend.device.waits import NoWaits, WaitError

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
