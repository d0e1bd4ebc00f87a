"""Logits processors that call `generate()` on the temporarily changed model.

Contrastive processors do this with `disable_adapter()`, a hook or other weights. The outer call
must continue with the unchanged model, and the inner call must see the change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor, PreTrainedModel

# Only texts whose tokens sum to a multiple of this make a nested call, to save time.
EVERY = 4


def _linear(model: PreTrainedModel) -> nn.Linear:
    """Return a linear layer in the middle of the model."""
    linears = [module for module in model.modules() if type(module) is nn.Linear]
    return linears[len(linears) // 2]


@contextlib.contextmanager
def hook(model: PreTrainedModel) -> Iterator[None]:
    handle = _linear(model).register_forward_hook(lambda module, given, output: -output)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def weights(model: PreTrainedModel) -> Iterator[None]:
    """Negate a weight through `.data`, which does not change its version counter."""
    weight = _linear(model).weight
    weight.data.mul_(-1)
    try:
        yield
    finally:
        weight.data.mul_(-1)


@contextlib.contextmanager
def weights_in_place(model: PreTrainedModel) -> Iterator[None]:
    with torch.no_grad():
        _linear(model).weight.mul_(-1)
        try:
            yield
        finally:
            _linear(model).weight.mul_(-1)


@contextlib.contextmanager
def parameter(model: PreTrainedModel) -> Iterator[None]:
    linear = _linear(model)
    before = linear.weight
    linear.weight = nn.Parameter(-before.detach(), requires_grad=False)
    try:
        yield
    finally:
        linear.weight = before


@contextlib.contextmanager
def forward(model: PreTrainedModel) -> Iterator[None]:
    """Replace the `forward` of a submodule that is not a linear layer."""
    module: Any = next(m for m in model.modules() if type(m).__name__.endswith("MLP"))
    before, has_own = module.forward, "forward" in vars(module)
    module.forward = lambda *given: -before(*given)
    try:
        yield
    finally:
        if has_own:
            module.forward = before
        else:
            del module.forward


@contextlib.contextmanager
def nothing(model: PreTrainedModel) -> Iterator[None]:
    yield


CHANGES: dict[str, Callable[[PreTrainedModel], contextlib.AbstractContextManager[None]]] = {
    change.__name__: change
    for change in (hook, weights, weights_in_place, parameter, forward, nothing)
}


class Contrast(LogitsProcessor):
    """Processor that lowers the scores of the tokens that the changed model generates next.

    Args:
        model: generates these tokens.
        change: a key of `CHANGES`.
        options: strategy of the inner `generate()`; empty for a plain call.
    """

    def __init__(self, model: PreTrainedModel, change: str, options: dict[str, Any]):
        self._model = model
        self._change = CHANGES[change]
        self._options = options

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Lower the scores of two tokens of some rows, which depend on the row's text alone."""
        scores = scores.clone()
        for row, text in enumerate(input_ids[:, -6:]):
            if int(text.sum()) % EVERY:
                continue
            with self._change(self._model):
                output = self._model.generate(
                    text[None],
                    attention_mask=torch.ones_like(text[None]),
                    max_new_tokens=2,
                    do_sample=False,
                    pad_token_id=0,
                    **self._options,
                )
            scores[row, output[0, -2:]] -= 3.0
        return scores
