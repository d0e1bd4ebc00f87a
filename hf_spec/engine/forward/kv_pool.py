"""Keys and values of a ragged batch: a buffer per layer, a slot per row, each with its own length.

Nothing is padded, cropped or concatenated. A forward pass writes its tokens after the committed
part of their slot. The accepted ones are then moved together, and the next forward pass overwrites
the rest (EMS-SD, Ni et al. 2024, arXiv 2405.07542, section 3.3). Layers with a sliding window have
full-length buffers; the window is applied by the attention mask.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, count
from typing import Any, TypeVar

import torch
from hf_spec_kernels import Moves, kv_keep
from torch import Tensor
from transformers import Cache, DynamicCache, cache_utils
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from hf_spec.backend.device import graph_store
from hf_spec.backend.device.transfer import send
from hf_spec.common.compat import CACHE_NAME
from hf_spec.common.errors import UnsupportedError

MIN_CAPACITY = 256
# Most tokens of all slots together to allocate before they are needed.
MAX_RESERVED = 2**13
# Room per slot beyond the tokens needed when memory is short.
LITTLE_ROOM = 64

_generations = count()

ResultT = TypeVar("ResultT")

REUSABLE_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    # Layers that cache nothing; in older transformers an empty layer of the classes above.
    getattr(cache_utils, "DummyLayer", LinearAttentionLayer),
)


class KVPool:
    """Per layer a key and a value buffer of shape (slots, H, capacity, D).

    The buffers of a layer are allocated at its first write, on the device and in the dtype of what
    is written. So layers may be on different devices and have different head sizes.

    Attributes:
        capacity: number of tokens per slot that are allocated.
        growths: how often filled buffers were copied to larger ones.
        retries: how often an operation was repeated after the device had run out of memory.
        generation: number of the current addresses, unique in the process; a layer that is added
            later does not change it.
        before_resize: called before buffers move to other addresses.
        when_full: called when the device has run out of memory, before stored graphs are freed.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.growths = self.retries = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.generation = next(_generations)
        self.before_resize: list[Callable[[], None]] = []
        self.when_full: list[Callable[[], None]] = []
        self._max_ahead = max(MAX_RESERVED // num_slots, 1)
        self.capacity = min(MIN_CAPACITY, self._max_ahead)
        # Tokens per slot: the most reserved so far, and the most that the call may need.
        self._needed = 0
        self._expected = 0

    def adopt(
        self, buffers: tuple[dict[int, Tensor], dict[int, Tensor]], capacity: int, generation: int
    ) -> None:
        """Use the buffers of an earlier pool, emptied, at their addresses."""
        (self.keys, self.values), self.capacity, self.generation = buffers, capacity, generation
        for buffer in (*self.keys.values(), *self.values.values()):
            buffer.zero_()

    def devices(self) -> set[torch.device]:
        """Return the devices of the buffers."""
        return {buffer.device for buffer in (*self.keys.values(), *self.values.values())}

    def expect(self, length: int) -> None:
        """Set the most tokens of a slot, 0 if unknown; allocate up to `MAX_RESERVED` of them."""
        self._expected = length
        first = min(length, self._max_ahead)
        if first > self.capacity:
            self._resize(first)

    def reserve(self, length: int) -> None:
        """Allocate room for `length` tokens per slot.

        Capacity grows by half, so copies stay rare. If memory is short, cached graphs are freed and
        capacity grows by `LITTLE_ROOM` only.
        """
        self._needed = max(self._needed, length)
        if length <= self.capacity:
            return
        with suppress(torch.OutOfMemoryError):
            self._resize(self._with_room(length))
            return
        self.retries += 1
        graph_store.free()
        self._resize(length + LITTLE_ROOM)

    def retried(self, run: Callable[[], ResultT]) -> ResultT:
        """Return `run()`; if the device runs out of memory, free some and call it once more.

        Stored graphs and the unused room of this pool are freed. `run` must have no effects that a
        second call would repeat; it may write the same keys and values again.
        """
        with suppress(torch.OutOfMemoryError):
            return run()
        # Memory is freed out here: the error being handled refers to the tensors of `run`.
        self.retries += 1
        for call in self.when_full:
            call()
        graph_store.free()
        self.trim()
        return run()

    def trim(self) -> None:
        """Free the room that no token has needed yet."""
        if self._needed < self.capacity:
            self._resize(max(self._needed, 1))

    def layer(self, index: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the buffers of layer `index`, allocated to fit (B, H, T, D) `key` and `value`.

        Both have the dtype of `value`; under autocast that of `key` may be another one.
        """
        if index not in self.keys:
            key = key.to(value.dtype)
            new = self._new(key, self.capacity), self._new(value, self.capacity)
            self.keys[index], self.values[index] = new
        return self.keys[index], self.values[index]

    def move_rows(self, moves: Sequence[tuple[int, Sequence[int], int]]) -> None:
        """Move tokens within their slots, in every layer.

        `moves` are (slot, source, start): tokens at the indices `source` go to `start`,
        `start + 1`, ... of the same slot. Each slot at most once.
        """
        if not moves:
            return
        by_device: dict[torch.device, list[Tensor]] = defaultdict(list)
        for buffers in (self.keys, self.values):
            for buffer in buffers.values():
                by_device[buffer.device].append(buffer)
        for device, device_buffers in by_device.items():
            kv_keep(device_buffers, _on_device(moves, device))

    def nbytes(self) -> int:
        """Return the memory of all buffers in bytes."""
        buffers = [*self.keys.values(), *self.values.values()]
        return sum(buffer.nelement() * buffer.element_size() for buffer in buffers)

    def load(self, cache: Cache, frame_masks: Sequence[Tensor]) -> None:
        """Fill the pool from a user's `DynamicCache`, padded on the left as in plain `generate()`.

        Sliding layers may have dropped all tokens before their window. `frame_masks` are per row
        (L,) bool, True where the cached entry is a real token.
        """
        counts = [int(mask.sum()) for mask in frame_masks]
        self.reserve(max(counts, default=0))
        layers: Sequence[Any] = cache.layers

        # Layers share indices: computing them makes the host wait for a GPU.
        @functools.cache
        def real(row: int, stored: int, device: torch.device) -> Tensor:
            mask = frame_masks[row]
            return mask[mask.shape[0] - stored :].nonzero()[:, 0].to(device)

        for index, layer in enumerate(layers):
            if getattr(layer, "keys", None) is None:
                continue
            key_buffer, value_buffer = self.layer(index, layer.keys, layer.values)
            for row, end in enumerate(counts):
                entries = real(row, layer.keys.shape[2], layer.keys.device)
                start = end - len(entries)
                key_buffer[row, :, start:end] = layer.keys[row][:, entries]
                value_buffer[row, :, start:end] = layer.values[row][:, entries]

    def export(
        self, cache: DynamicCache, frame_masks: Sequence[Tensor], lengths: Sequence[int]
    ) -> DynamicCache:
        """Write the pool into an empty cache of the model, in the layout of plain `generate()`.

        `frame_masks` are per row (L,) bool; the `lengths[row]` stored tokens fill the first True
        entries.
        """
        width, rows = frame_masks[0].shape[0], list(zip(frame_masks, lengths, strict=True))

        # Layers share indices: computing them makes the host wait for a GPU.
        @functools.cache
        def indices(device: torch.device) -> list[Tensor]:
            return [mask.nonzero()[:length, 0].to(device) for mask, length in rows]

        for index in sorted(self.keys):
            pair = []
            for buffer in (self.keys[index], self.values[index]):
                frame = buffer.new_zeros(len(lengths), buffer.shape[1], width, buffer.shape[3])
                for row, entries in enumerate(indices(buffer.device)):
                    frame[row, :, entries] = buffer[row, :, : len(entries)]
                pair.append(frame)
            cache.update(pair[0], pair[1], index)
        return cache

    def _with_room(self, length: int) -> int:
        """Return the capacity to grow to for `length` tokens per slot."""
        most = self._max_ahead
        room = length + min(length // 2, most)
        if length <= most:
            room = min(room, most)
        return min(room, self._expected) if length <= self._expected else room

    def _resize(self, capacity: int) -> None:
        """Reallocate every buffer with `capacity` tokens per slot.

        An interrupted call leaves the pool usable: buffers are replaced one by one.
        """
        for call in self.before_resize:
            call()
        self.generation = next(_generations)
        copied = min(self.capacity, capacity)
        # Buffers that are replaced before an interruption may have become smaller.
        self.capacity, before = copied, self.capacity
        for buffers in (self.keys, self.values):
            for layer, old in buffers.items():
                new = self._new(old, capacity)
                new[:, :, :copied] = old[:, :, :copied]
                buffers[layer] = new
        self.growths += bool(self.keys) and capacity > before
        self.capacity = capacity

    def _new(self, like: Tensor, capacity: int) -> Tensor:
        # Zeros, not empty: a masked entry still takes part in weights @ values, and 0 * NaN is NaN.
        return like.new_zeros(self.num_slots, like.shape[1], capacity, like.shape[3])


def _on_device(moves: Sequence[tuple[int, Sequence[int], int]], device: torch.device) -> Moves:
    """Return the moves as the kernel reads them, copied in one transfer."""
    slots, sources, starts = zip(*moves, strict=True)
    ends = list(accumulate(len(source) for source in sources))
    columns = (slots, starts, [index for source in sources for index in source], [0, *ends])
    tensors = [torch.tensor(column, dtype=torch.int32) for column in columns]
    slot, target, source, source_start = send(tensors, device)
    return Moves(slot, target, source, source_start, max(len(source) for source in sources))


def check_reusable(cache: object) -> None:
    """Raise `UnsupportedError` for a user's cache that cannot be moved to a `KVPool` and back."""
    layers = getattr(cache, "layers", None)
    if type(cache) is not DynamicCache or any(
        type(layer) not in REUSABLE_LAYERS for layer in layers or []
    ):
        kinds = sorted({type(layer).__name__ for layer in layers or []})
        raise UnsupportedError(
            f"{CACHE_NAME} of type {type(cache).__name__} with layers {kinds} cannot be used "
            "with spec_strategy; pass a DynamicCache, or leave it out"
        )


@dataclass
class _Placement:
    """State shared by the layers of a `PoolCache`.

    It has no reference to the cache: a reference cycle would outlive the call.
    """

    pool: KVPool
    destination: Tensor
    visible: int = 0


class PoolCache(Cache):
    """A `KVPool` as a cache of transformers, for models without the attention interface.

    `place` is called before each forward pass. Padding is written to the last entry of the slot,
    which every mask hides.
    """

    def __init__(self, pool: KVPool, num_layers: int):
        self._placement = _Placement(pool, torch.zeros(0))
        super().__init__(layers=[_PoolLayer(self._placement, i) for i in range(num_layers)])

    def place(self, destination: Tensor, visible: int) -> None:
        """Set the (B, T) indices that the next forward pass writes, and its number of keys."""
        self._placement.destination = destination
        self._placement.visible = visible


class _PoolLayer(CacheLayerMixin):
    is_sliding = False
    is_compileable = False

    def __init__(self, placement: _Placement, index: int):
        super().__init__()
        self.placement = placement
        self.index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the pool allocates its buffers at the first write."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write (B, H, T, D) at the indices set by `place`; return the visible keys and values."""
        placement = self.placement
        buffers = placement.pool.layer(self.index, key_states, value_states)
        indices = placement.destination.to(key_states.device)
        slots = torch.arange(indices.shape[0], device=indices.device)[:, None]
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer[slots, :, indices] = states.transpose(1, 2)
        visible = placement.visible
        return buffers[0][:, :, :visible], buffers[1][:, :, :visible]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of the keys that a mask covers."""
        return self.placement.visible, 0

    def get_seq_length(self) -> int:
        """Return the number of keys visible in the next forward pass; positions are passed."""
        return self.placement.visible

    def get_max_length(self) -> int:
        """Return the capacity of a slot in tokens."""
        return self.placement.pool.capacity
