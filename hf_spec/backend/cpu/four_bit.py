"""4-bit layers of bitsandbytes by our kernel, on processors with AVX512-BF16.

There, bitsandbytes rearranges a weight in its first call and rounds its scales to bfloat16. The
kernel reads that storage in place: no memory is added, and changes need no detection. Its results
have the same bits as those of bitsandbytes 0.50. In other layouts bitsandbytes dequantizes the
whole weight in every call; those stay with bitsandbytes.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from hf_spec_kernels.four_bit_linear import BuildError, build, four_bit_linear
from torch import Tensor, nn

logger = logging.getLogger(__name__)

# Longer inputs are prompts, which bitsandbytes runs.
MAX_ROWS = 64
# PEFT has classes of the same names, which add to the result.
MODULE = "bitsandbytes.nn.modules"
CLASSES = ("Linear4bit", "LinearNF4", "LinearFP4")


def is_four_bit(module: nn.Module) -> bool:
    """Return True for a 4-bit layer of bitsandbytes on a CPU that our kernel may run."""
    if type(module).__module__ != MODULE or type(module).__name__ not in CLASSES:
        return False
    layer: Any = module
    if layer.weight.device.type != "cpu":
        return False
    if not getattr(layer, "support_avx512bf16_for_cpu", False):
        _log_once("the processor, or this version of bitsandbytes, has no AVX512-BF16 layout")
        return False
    try:
        build()
    except BuildError as error:
        _log_once(str(error))
        return False
    return True


def four_bit_forward(layer: Any, states: Tensor) -> Tensor | None:
    """Compute what `Linear4bit.forward` returns; None where bitsandbytes has to run.

    The first call is left to bitsandbytes, which rearranges the weight.
    """
    quantization: Any = getattr(layer.weight, "quant_state", None)
    codes = layer.weight.data
    if (
        not getattr(quantization, "packing_format_for_cpu", False)
        or not layer.compute_type_is_set
        or layer.training
        or not 0 < states.numel() <= MAX_ROWS * states.shape[-1]
    ):
        return None
    scales = quantization.absmax
    if 2 * codes.shape[-1] != states.shape[-1] or scales.dtype != torch.bfloat16:
        _log_once(f"codes of shape {tuple(codes.shape)} with scales in {scales.dtype}")
        return None
    compute = layer.compute_dtype or states.dtype
    # bitsandbytes rounds to the compute dtype first.
    rounded = states.to(compute).to(torch.bfloat16)
    table = _table(quantization.quant_type)
    results = four_bit_linear(rounded, codes, scales, table).to(compute)
    if layer.bias is not None:
        results += layer.bias.to(compute)
    return results.to(states.dtype)


@functools.cache
def _table(quant_type: str) -> Tensor:
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type(quant_type, device="cpu").bfloat16()


@functools.cache
def _log_once(reason: str) -> None:
    logger.info("4-bit layers are run by bitsandbytes: %s", reason)
