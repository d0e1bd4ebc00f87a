"""Parts that published heads share: checked tensors, output heads, overrides of their configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedHead
from hf_spec.adapters.reading import check_tensors
from hf_spec.backend.device.placement import execution_device
from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.engine.forward.vocabulary import PADDED_ROWS, num_embeddings
from hf_spec.methods.feature_pairs.draft_head import FewTokensHead

# Prefixes of tensors that some versions of speculators copy from the target.
TARGET_COPIES = ("verifier_lm_head.", "verifier_norm.")


def head_dtype(target: PreTrainedModel) -> torch.dtype:
    """Return the dtype of the heads of `target`; their activations overflow in float16."""
    return torch.bfloat16 if target.dtype == torch.float16 else target.dtype


def sizes_of(target: PreTrainedModel) -> tuple[int, int]:
    """Return hidden size and vocabulary size of a target."""
    return target.config.get_text_config().hidden_size, num_embeddings(target)


def check_aux_layers(layers: object) -> None:
    """Raise `OptionError` unless the option `aux_layers` is None or a list of indices."""
    whole = isinstance(layers, (list, tuple)) and all(type(index) is int for index in layers)
    if layers is not None and not (whole and layers):
        raise OptionError(f"aux_layers={layers!r:.60} must be a list of indices such as [2, 16]")


def config_overrides(config: Any, names: Sequence[str]) -> tuple[tuple[str, Any], ...]:
    """Return the options in a strategy's config that override the config of a published head."""
    values = {name: getattr(config, name) for name in names}
    return tuple(
        (name, tuple(value) if isinstance(value, list) else value)
        for name, value in values.items()
        if value is not None
    )


def fitted(
    head: PublishedHead,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Sequence[int]],
    target: PreTrainedModel,
) -> dict[str, Tensor]:
    """Return the tensors in the head's dtype on the device of the target's output head.

    The first name or shape that differs from `expected` raises `AssistantError`.
    """
    size, vocab = sizes_of(target)
    source = f"a target of hidden size {size} and {vocab} tokens"
    check_tensors(repr(head.name), tensors, expected, source)
    device, dtype = execution_device(target.get_output_embeddings()), head_dtype(target)
    return {name: tensor.to(device, dtype) for name, tensor in tensors.items()}


def with_offsets(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors without the (V,) mask "t2d"; it becomes "d2t" if that is missing.

    Draft vocabularies are in ascending order.
    """
    rest = dict(tensors)
    mask, scores = rest.pop("t2d", None), rest.get("lm_head.weight")
    if mask is not None and scores is not None and "d2t" not in rest:
        ids = mask.flatten().nonzero().flatten()
        # Heads for the whole vocabulary may have a mask of zeros.
        if len(ids) == len(scores):
            rest["d2t"] = ids - torch.arange(len(ids))
    return rest


def draft_vocab_ids(
    what: str, offsets: Tensor | None, draft_vocab_size: int, full_size: int
) -> Tensor | None:
    """Return the (R,) int64 token ids of a head's R outputs; None for all V in order.

    `offsets` are the (R,) tensor "d2t", token id minus output index. None selects the first tokens,
    up to rows that pad one of the two vocabularies. `what` names the head in messages.

    Raises:
        AssistantError: if outputs lack an offset, or offsets lead out of V or to a token twice.
    """
    if offsets is None:
        if abs(draft_vocab_size - full_size) > PADDED_ROWS:
            raise AssistantError(
                f"{what} has outputs for {draft_vocab_size} of {full_size} tokens, but no tensor "
                "'d2t' that maps them to token ids"
            )
        return None if draft_vocab_size >= full_size else torch.arange(draft_vocab_size)
    if offsets.shape != (draft_vocab_size,) or offsets.is_floating_point():
        raise AssistantError(
            f"{what} is damaged: d2t is {tuple(offsets.shape)} of {offsets.dtype}, not "
            f"{draft_vocab_size} whole numbers"
        )
    tokens = offsets.long() + torch.arange(draft_vocab_size)
    if int(tokens.min()) < 0 or int(tokens.max()) >= full_size:
        raise AssistantError(
            f"{what} is for another target: d2t leads to token {int(tokens.max())}, but the target "
            f"has {full_size}"
        )
    if len(tokens.unique()) < draft_vocab_size:
        raise AssistantError(f"{what} is damaged: d2t leads to some tokens twice")
    return None if draft_vocab_size == full_size and not bool(offsets.any()) else tokens


class OutputHead(FewTokensHead):
    """Output projection of a published head: its own (R, width) weights, or the target's.

    `vocabulary` are the (R,) int64 token ids of the outputs; None for all tokens.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        weight: Tensor | None = None,
        vocabulary: Tensor | None = None,
    ):
        if weight is None:
            super().__init__(target.get_output_embeddings(), vocabulary)
            self.dtype = target.dtype
            return
        super().__init__(linear(weight), None)
        self.dtype = weight.dtype
        self.full_size = sizes_of(target)[1]
        self.vocabulary = None if vocabulary is None else vocabulary.to(weight.device)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """(..., width) -> (..., R) logits of the tokens in `vocabulary`."""
        return super().draft_logits(hidden.to(self.dtype))


def linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """Return a linear layer that uses these weights without copying them."""
    with torch.device("meta"):
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
