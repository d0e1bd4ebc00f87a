"""Copies of draft models that are faster: 4-bit weights, and few tokens in the output head.

Drafts need not be exact, so neither changes the target's output. A decoding step of a small model
is bound by the bytes that it reads. 4-bit weights are a quarter of bfloat16 ones; the head of a
vocabulary of 150,000 tokens is a fifth of a model of 0.6 billion parameters. Tokenizers made by
merging pairs number tokens by frequency, so the first tokens of the vocabulary suffice (compare
FR-Spec, Zhao et al. 2025, arXiv 2502.14856, which counts them in texts).
"""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.common.installing import how_to_install
from hf_spec.engine.forward.model_cache import cached_per_model
from hf_spec.methods.feature_pairs.draft_head import FewTokensHead
from hf_spec.training.responses import end_tokens

# Weights of other widths are left as they are: a block of 4-bit weights has 64 inputs, and
# bitsandbytes arranges outputs in groups of 32 or 64 for some processors.
BLOCK = 64


def smaller_model(
    model: PreTrainedModel, bits: int | None, vocab_size: int | None
) -> PreTrainedModel:
    """Return a faster copy of a draft model, made once per model and options.

    The copy shares all weights but those that are quantized or cut; `model` is not changed.

    Args:
        model: the draft model.
        bits: 4 for NF4 weights of bitsandbytes in linear layers whose sizes are multiples of 64,
            except the output head; None to leave them.
        vocab_size: number of tokens of the output head, the first of the vocabulary; those that end
            a text are added. None for all.

    Raises:
        OptionError: if bitsandbytes is missing, or the model drafts few tokens already.
        AssistantError: if the model has no linear layers that can be quantized.
    """
    if bits is None and vocab_size is None:
        return model
    key = ("smaller", bits, vocab_size, model.device, model.dtype)
    return cached_per_model(model, key, lambda: _make(model, bits, vocab_size))


def _make(model: PreTrainedModel, bits: int | None, vocab_size: int | None) -> PreTrainedModel:
    if bits is not None and importlib.util.find_spec("bitsandbytes") is None:
        raise OptionError(
            f"assistant_bits={bits} needs the package bitsandbytes: {how_to_install('quant')}"
        )
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    smaller = copy.deepcopy(model, shared)
    # Building it inside an inference mode block would make weights that no other thread may use.
    with torch.inference_mode(False), torch.no_grad():
        if bits is not None:
            _quantize(smaller)
        if vocab_size is not None:
            _cut_vocabulary(smaller, vocab_size)
    return smaller.requires_grad_(False).eval()


def _quantize(model: PreTrainedModel) -> None:
    """Replace the linear layers of a model but its output head by 4-bit ones."""
    head, replaced = model.get_output_embeddings(), 0
    for module in list(model.modules()):
        for name, layer in list(module.named_children()):
            if type(layer) is not nn.Linear or layer is head:
                continue
            if layer.in_features % BLOCK == layer.out_features % BLOCK == 0:
                setattr(module, name, _four_bit(layer))
                replaced += 1
    if not replaced:
        raise AssistantError(
            f"assistant_bits: {type(model).__name__} has no linear layers in full precision whose "
            f"sizes are multiples of {BLOCK}; leave it out"
        )


def _four_bit(layer: nn.Linear) -> nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    weight = layer.weight
    four_bit: Any = Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=weight.dtype,
        quant_type="nf4",
        device="meta",
    )
    # bitsandbytes quantizes on the move to a device.
    four_bit.weight = Params4bit(weight.detach().cpu(), requires_grad=False, quant_type="nf4")
    four_bit.bias = layer.bias
    return four_bit.to(weight.device)


def _cut_vocabulary(model: PreTrainedModel, vocab_size: int) -> None:
    """Let the output head of a model know few tokens only."""
    head = model.get_output_embeddings()
    if isinstance(head, FewTokensHead):
        raise OptionError(
            f"draft_vocab_size={vocab_size}: the assistant drafts {head.size} of {head.full_size} "
            "tokens already; leave it out"
        )
    size = head.weight.shape[0]
    if vocab_size < size:
        model.set_output_embeddings(FewTokensHead(head, _vocabulary(model, vocab_size, size)))


def _vocabulary(model: PreTrainedModel, vocab_size: int, full_size: int) -> Tensor:
    """Return the (R,) ids of the first tokens and of the tokens that end a text."""
    known = {*range(vocab_size), *end_tokens(model)}
    return torch.tensor(sorted(token for token in known if token < full_size))
