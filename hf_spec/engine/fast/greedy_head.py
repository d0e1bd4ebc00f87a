"""Output heads of which greedy decoding reads the best logit alone.

A head can leave out logits that are not the best (see `screened_weight`), if nothing reads or
changes them between the head and the verifier. That is checked where it matters: the logits of a
first forward pass must be the memory that the head wrote. Softcaps, scales and casts write their
own; hooks might read any.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.modules import module as every_module
from transformers import PreTrainedModel

from hf_spec.backend.cpu.packed_weights import version_of


class GreedyHead:
    """The output head of a model during one generation, in forward passes whose best logits count.

    Attributes:
        confirmed: True if logits are the head's own output; None before the first pass.
    """

    def __init__(self, model: PreTrainedModel):
        self._model = model
        self._head = model.get_output_embeddings()
        self._output: Tensor | None = None
        self._version = 0
        self.confirmed: bool | None = None

    def may_screen(self, linear: nn.Module) -> bool:
        """Return True if `linear` is the head, and only the best of its outputs are read."""
        return self.confirmed is True and linear is self._head and not self._has_hooks()

    def record(self, linear: nn.Module, output: Tensor) -> None:
        """Remember what the head computed in the first pass."""
        if self.confirmed is None and linear is self._head:
            self._output, self._version = output, version_of(output)

    def confirm(self, logits: Tensor) -> None:
        """Compare the logits of the first pass with the output of the head."""
        if self.confirmed is not None:
            return
        output, self._output = self._output, None
        self.confirmed = (
            output is not None
            and (output.data_ptr(), output.numel()) == (logits.data_ptr(), logits.numel())
            and (output.dtype, output.shape[-1]) == (logits.dtype, logits.shape[-1])
            and version_of(output) == self._version
        )

    def _has_hooks(self) -> bool:
        return bool(
            every_module._global_forward_hooks
            or any(module._forward_hooks for module in (self._model, self._head))
        )
