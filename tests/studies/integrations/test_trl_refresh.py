"""TRL refresh study: every contender generates every rollout of a real training."""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl", reason="needs the extra 'rl'")

from examples.studies.integrations import trl_refresh
from hf_spec.adapters.folder import save_adapter
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from tests.cli.answer.conftest import make_tokenizer
from tests.tiny_models import build

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("greedy", [True, False])
def test_rollouts(greedy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = copy.deepcopy(build("llama")), make_tokenizer()
    tokenizer.padding_side = "left"
    torch.manual_seed(0)
    head = FalconHead(model, FalconShape(1), torch.arange(60)).to_adapter({"max_depth": 4})
    save_adapter(tmp_path / "head", head)
    monkeypatch.setattr(trl_refresh, "HEAD", tmp_path / "head")
    monkeypatch.setattr(trl_refresh, "NEW_TOKENS", 12)
    options = argparse.Namespace(steps=3, learning_rate=1e-3, head_rate=1e-3)
    found = trl_refresh.measure(model, tokenizer, tmp_path, greedy, options)
    assert len(found["rollouts"]) == 3
    assert found["refresh_seconds"] > 0
    for row in found["table"].values():
        assert row["speedup"] > 0
        assert row["same"] == (3 if greedy else None)
