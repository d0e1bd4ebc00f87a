"""What the last layer of a model gives, before the final norm: no index of its states shows it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.common.errors import UnsupportedError

# Stands for these states among indices into `hidden_states`, of which the last is normed.
BEFORE_NORM = sys.maxsize


class LastLayer:
    """Keeps the output of the last layer of `model` in the newest watched forward pass."""

    def __init__(self, model: PreTrainedModel):
        depth = model.config.get_text_config().num_hidden_layers
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        stacks = [layers for layers in lists if len(layers) == depth]
        if len(stacks) != 1:
            raise UnsupportedError(
                f"{type(model).__name__} has {len(stacks)} lists of {depth} layers, so what its "
                "last layer gives cannot be read; choose other aux_layers"
            )
        self._layer = stacks[0][-1]
        self._states: Tensor | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Keep what the forward passes of this thread give while the block runs.

        The hook is there for that long only: a model with hooks is not captured as a CUDA graph.
        """
        thread = threading.get_ident()

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                self._states = output if isinstance(output, Tensor) else output[0]

        handle = self._layer.register_forward_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def take(self) -> Tensor:
        """Return the (B, T, H) output of the newest forward pass, once."""
        assert self._states is not None, "forwards happen while watched"
        states, self._states = self._states, None
        return states
