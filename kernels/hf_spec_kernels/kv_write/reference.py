"""Writing keys and values with indexing."""

from __future__ import annotations

from torch import Tensor


def kv_write_ref(key: Tensor, value: Tensor, keys: Tensor, values: Tensor, place: Tensor) -> None:
    """See `kv_write`; waits for the device."""
    (written,) = (place[0] >= 0).nonzero(as_tuple=True)
    slot, where = place[:, written].long()
    keys[slot, :, where] = key[written]
    values[slot, :, where] = value[written]
