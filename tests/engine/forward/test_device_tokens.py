"""Device tokens on another device."""

from __future__ import annotations

import torch

from hf_spec.engine.forward.device_tokens import DeviceTokens

META = torch.device("meta")


def test_both_parts_move() -> None:
    given = DeviceTokens(torch.arange(3), torch.zeros(3, 1, dtype=torch.uint8)).to(META)
    assert given.sees is not None
    assert (given.tokens.device, given.sees.device) == (META, META)
    assert DeviceTokens(torch.arange(3)).to(META).sees is None
