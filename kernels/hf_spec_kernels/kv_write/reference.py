"""Reference of `kv_write` with indexing."""

from __future__ import annotations

from torch import Tensor


def kv_write_ref(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor
) -> None:
    """Compute `kv_write`; synchronizes with the device."""
    (written,) = (slot_mapping[0] >= 0).nonzero(as_tuple=True)
    slot, where = slot_mapping[:, written].long()
    keys[slot, :, where] = key[written]
    values[slot, :, where] = value[written]
