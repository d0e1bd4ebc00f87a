"""Output of the last layer: the input of the final norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_spec import UnsupportedError
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.last_layer import BEFORE_NORM, LastLayer
from hf_spec.engine.runner import ModelRunner
from tests.tiny_models import build, repetitive_prompt


@pytest.mark.parametrize("name", ["llama", "bloom", "gemma3"])
@torch.no_grad()
def test_a_forward_returns_it(name: str) -> None:
    tokens = repetitive_prompt(9)[0].tolist()
    model: Any = build(name)
    runner = ModelRunner(model, 1, hidden_layers=(BEFORE_NORM, -1))
    with runner.active():
        output = runner.forward(DraftTree.from_rows([(tokens[-1:], [-1])]), [tokens])
    decoder = model.get_decoder()
    norm = decoder.norm if name != "bloom" else decoder.ln_f
    torch.testing.assert_close(norm(output.hidden[BEFORE_NORM]), output.hidden[-1])
    assert not torch.equal(output.hidden[BEFORE_NORM], output.hidden[-1])
    hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
    assert not any("LastLayer" in repr(hook) for hook in hooks)


def test_layers_that_cannot_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    monkeypatch.setattr(model.config, "num_hidden_layers", 7)
    with pytest.raises(UnsupportedError, match="0 lists of 7 layers"):
        LastLayer(model)


def test_the_hook_goes_after_an_exception() -> None:
    model: Any = build("llama")
    hooks = model.model.layers[-1]._forward_hooks
    before = dict(hooks)
    with pytest.raises(RuntimeError, match="interrupted"), LastLayer(model).watched():
        raise RuntimeError("interrupted")
    assert dict(hooks) == before
