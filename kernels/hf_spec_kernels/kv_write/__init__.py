"""Write new keys and values to their slots."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_spec_kernels.dispatch import DTYPES, check_tensor, implementation
from hf_spec_kernels.kv_write import cpu
from hf_spec_kernels.kv_write.reference import kv_write_ref


def kv_write(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    impl: str = "auto",
) -> None:
    """Write keys and values of packed tokens to a pool, in place.

    Attention launched later on the same stream reads the new values.

    Args:
        key: (T, H, D), any strides but the last, which is 1.
        value: (T, H, Dv).
        keys: (S, H, C, D) of the same dtype, S slots of C entries; changed.
        values: (S, H, C, Dv); changed.
        slot_mapping: (2, T) int32, slot and entry in it of each token. Tokens of slot -1 are
            skipped; two tokens must not have the same entry.
        impl: see the package.
    """
    chosen = implementation(key, impl, cpu.SOURCE)
    if chosen == "torch":
        kv_write_ref(key, value, keys, values, slot_mapping)
        return
    _check(key, value, keys, values, slot_mapping)
    if chosen == "cpp":
        cpu.kv_write(key, value, keys, values, slot_mapping)
        return
    from hf_spec_kernels.kv_write import kernel

    with torch.cuda.device_of(key):
        kernel.kv_write(key, value, keys, values, slot_mapping)


def _check(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor) -> None:
    device, dtype = key.device, key.dtype
    num_tokens, num_heads, head_size = key.shape
    check_tensor("key", key, (None, None, None), DTYPES, device)
    check_tensor("value", value, (num_tokens, num_heads, None), dtype, device)
    check_tensor("keys", keys, (None, num_heads, None, head_size), dtype, device)
    check_tensor("values", values, (*keys.shape[:3], value.shape[2]), dtype, device)
    check_tensor("slot_mapping", slot_mapping, (2, num_tokens), torch.int32, device)
    if not slot_mapping.is_contiguous():
        raise ValueError("slot_mapping must be contiguous: call .contiguous() on it")
