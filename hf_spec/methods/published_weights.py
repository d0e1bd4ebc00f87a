"""The weights of published heads: checked against what they must be, and put beside a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedHead
from hf_spec.adapters.reading import check_tensors
from hf_spec.backend.device.placement import execution_device
from hf_spec.common.errors import AssistantError
from hf_spec.engine.forward.vocabulary import PADDED_ROWS, num_embeddings
from hf_spec.methods.feature_pairs.draft_head import FewTokensHead


def head_dtype(target: PreTrainedModel) -> torch.dtype:
    """What a head of `target` computes in: the target's dtype, but never float16.

    The activations of heads were never meant for it; they overflow.
    """
    return torch.bfloat16 if target.dtype == torch.float16 else target.dtype


def sizes_of(target: PreTrainedModel) -> tuple[int, int]:
    """Hidden size and number of tokens of a target."""
    return target.config.get_text_config().hidden_size, num_embeddings(target)


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


def known_tokens(
    what: str, offsets: Tensor | None, num_known: int, full_size: int
) -> Tensor | None:
    """(R,) int64 tokens that R outputs of a head stand for; None for all of V, in their order.

    `offsets`, the tensor "d2t", has for each how far its token is from its place. Without it the
    first tokens are meant, up to rows that pad one of the two vocabularies.

    Raises:
        AssistantError: if outputs lack an offset, or offsets lead out of V or to a token twice.
    """
    if offsets is None:
        if abs(num_known - full_size) > PADDED_ROWS:
            raise AssistantError(
                f"{what} knows {num_known} of {full_size} tokens and lacks d2t, which says which"
            )
        return None if num_known >= full_size else torch.arange(num_known)
    if offsets.shape != (num_known,) or offsets.is_floating_point():
        raise AssistantError(
            f"{what} is damaged: d2t is {tuple(offsets.shape)} of {offsets.dtype}, not {num_known} "
            "whole numbers"
        )
    tokens = offsets.long() + torch.arange(num_known)
    if int(tokens.min()) < 0 or int(tokens.max()) >= full_size:
        raise AssistantError(
            f"{what} is for another target: d2t leads to token {int(tokens.max())}, and there are "
            f"{full_size}"
        )
    if len(tokens.unique()) < num_known:
        raise AssistantError(f"{what} is damaged: d2t leads to some tokens twice")
    return None if num_known == full_size and not bool(offsets.any()) else tokens


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

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """(..., width) -> (..., R), the logits of the vocabulary alone."""
        return super().draft_logits(hidden.to(self.dtype))


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
