"""Output of a model's last layer before the final norm, which `hidden_states` does not contain."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.common.errors import UnsupportedError

# Index of this output among indices into `hidden_states`, whose last entry is normed.
BEFORE_NORM = sys.maxsize


class LastLayer:
    """Output of the last layer of `model` in its latest watched forward pass."""

    def __init__(self, model: PreTrainedModel):
        depth = model.config.get_text_config().num_hidden_layers
        lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
        stacks = [layers for layers in lists if len(layers) == depth]
        if len(stacks) != 1:
            raise UnsupportedError(
                f"{type(model).__name__} has {len(stacks)} lists of {depth} layers, so the output "
                "of its last layer cannot be read; choose other aux_layers"
            )
        self._layer = stacks[0][-1]
        self._states: Tensor | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Record the output in forward passes of this thread inside the block.

        The hook is removed afterwards, since a model with hooks cannot be captured as a CUDA graph.
        """
        thread = threading.get_ident()

        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            if threading.get_ident() == thread:
                self._states = output if isinstance(output, Tensor) else output[0]

        handle = self._layer.register_forward_hook(record)
        try:
            yield
        finally:
            handle.remove()

    def take(self) -> Tensor:
        """Return the (B, T, H) output of the latest forward pass, and drop it."""
        assert self._states is not None, "forwards happen while watched"
        states, self._states = self._states, None
        return states
