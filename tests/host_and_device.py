"""Comparison of drafts that grow on the device with drafts that grow on the host.

On a CPU drafters grow on the host; here growth on the device is forced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_spec.drafting import level_drafter
from hf_spec.drafting.level_drafter import LevelDrafter


def check_same_drafts(
    monkeypatch: pytest.MonkeyPatch, kind: type[LevelDrafter], run: Callable[[], Any]
) -> None:
    """Check that both ways yield the same drafts; `run` generates with drafters of `kind`."""
    on_host, on_device = (_drafts(monkeypatch, kind, run, way) for way in (False, True))
    assert len(on_host) == len(on_device)
    assert max(len(tokens) for tokens, *_ in on_host) > 2
    for one, other in zip(on_host, on_device, strict=True):
        assert one[:3] == other[:3]
        assert one[3] == pytest.approx(other[3], rel=1e-3, abs=1e-5)


def _drafts(
    monkeypatch: pytest.MonkeyPatch, kind: type[LevelDrafter], run: Callable[[], Any], way: bool
) -> list[Any]:
    found: list[Any] = []
    whole = kind.draft

    def draft(self: LevelDrafter, state: Any, limits: Any) -> Any:
        tree = whole(self, state, limits)
        found.append((tree.tokens, tree.parent, tree.row_start, tree.node_probs))
        return tree

    def nothing(*_: Any) -> Any:
        raise AssertionError("grew the other way")

    with monkeypatch.context() as patch:
        patch.setattr(kind, "draft", draft)
        patch.setattr(kind, "supports_device_growth", way)
        patch.setattr(level_drafter, "Growth" if way else "DeviceGrowth", nothing)
        torch.manual_seed(0)
        run()
    return found
