"""The weights of published heads: checked against what they must be, and put beside a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedHead
from hf_spec.adapters.reading import check_tensors
from hf_spec.devices.placement import execution_device
from hf_spec.errors import AssistantError
from hf_spec.models.draft_head import FewTokensHead


def head_dtype(target: PreTrainedModel) -> torch.dtype:
    """What a head of `target` computes in: the target's dtype, but never float16.

    The activations of heads were never meant for it; they overflow.
    """
    return torch.bfloat16 if target.dtype == torch.float16 else target.dtype


def sizes_of(target: PreTrainedModel) -> tuple[int, int]:
    """Hidden size and number of tokens of a target."""
    config = target.config.get_text_config()
    return config.hidden_size, config.vocab_size


def fitted(
    head: PublishedHead,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Sequence[int]],
    target: PreTrainedModel,
) -> dict[str, Tensor]:
    """The tensors beside the target's own head, if they are of the `expected` names and shapes.

    Raises:
        AssistantError: names the first that is missing, too many, or of another shape.
    """
    size, vocab = sizes_of(target)
    source = f"a target of hidden size {size} and {vocab} tokens"
    check_tensors(repr(head.name), tensors, expected, source)
    device, dtype = execution_device(_output(target)), head_dtype(target)
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


def published_vocabulary(head: PublishedHead, num_known: int, size: int) -> Tensor | None:
    """(R,) int64 the tokens that the R outputs of a head stand for; None for all V in order.

    The tensor "d2t" holds for each how far its token id is from its place.

    Raises:
        AssistantError: if there are R < V outputs without it, or it leads out of the vocabulary.
    """
    offsets = head.tensors.get("d2t")
    if offsets is None:
        if num_known != size:
            raise AssistantError(
                f"{head.name!r} knows {num_known} of the target's {size} tokens and has no 'd2t', "
                "which says which ones"
            )
        return None
    if offsets.shape != (num_known,) or offsets.is_floating_point():
        raise AssistantError(
            f"{head.name!r}: 'd2t' is of shape {tuple(offsets.shape)} and {offsets.dtype}, not one "
            f"offset for each of {num_known} outputs"
        )
    tokens = offsets.long() + torch.arange(num_known)
    if int(tokens.min()) < 0 or int(tokens.max()) >= size or len(tokens.unique()) < num_known:
        raise AssistantError(
            f"{head.name!r}: 'd2t' does not lead to {num_known} different tokens below {size}; it "
            "holds offsets, not token ids"
        )
    return tokens


class OutputHead(FewTokensHead):
    """What reads tokens off the outputs of a published head: its own projection, or the target's.

    Args:
        target: the model that the head is for.
        weight: (R, width) of its own; None for the target's.
        vocabulary: (R,) int64 the tokens that it knows; None for all.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        weight: Tensor | None = None,
        vocabulary: Tensor | None = None,
    ):
        if weight is None:
            super().__init__(_output(target), vocabulary)
            self.dtype = target.dtype
            return
        super().__init__(linear(weight), None)
        self.dtype = weight.dtype
        self.full_size = sizes_of(target)[1]
        self.vocabulary = None if vocabulary is None else vocabulary.to(weight.device)

    def known(self, hidden: Tensor) -> Tensor:
        """(..., width) -> (..., R), the logits of the vocabulary alone."""
        return super().known(hidden.to(self.dtype))


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A layer of these weights, which are not copied."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer


def _output(target: PreTrainedModel) -> nn.Module:
    module = target.get_output_embeddings()
    assert module is not None, "a causal language model has a head"
    return module
