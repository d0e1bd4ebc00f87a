"""New keys and values into their slots."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_spec_kernels.dispatch import serves
from hf_spec_kernels.kv_write.reference import kv_write_ref


def kv_write(
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    place: Tensor,
    impl: str = "auto",
) -> None:
    """Write keys and values of packed tokens into a pool, in place.

    It is a launch of its own: an attention launched later on the same stream reads what it wrote.

    Args:
        key: (T, H, D), any strides but the last, which is 1.
        value: (T, H, Dv).
        keys: (S, H, C, D) of the same dtype, S slots of C places; changed.
        values: (S, H, C, Dv); changed.
        place: (2, T) int32, slot and place of each token. A token of slot -1 is left out; two
            tokens must not share a place.
        impl: see the package.
    """
    if not serves(key, impl):
        kv_write_ref(key, value, keys, values, place)
        return
    from hf_spec_kernels.kv_write import kernel

    with torch.cuda.device_of(key):
        kernel.kv_write(key, value, keys, values, place)
