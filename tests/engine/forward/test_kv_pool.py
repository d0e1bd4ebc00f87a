"""KV pool: growth, moves, and conversion from and to a user's cache."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from hf_spec.backend.device import graph_store
from hf_spec.backend.device.graph_store import StoredGraphs
from hf_spec.common.compat import CACHE_NAME
from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.forward.kv_pool import (
    LITTLE_ROOM,
    MAX_RESERVED,
    MIN_CAPACITY,
    KVPool,
    check_reusable,
)
from tests import tiny_models

HEADS, WIDTH, VALUE_WIDTH = 2, 4, 3


def filled_pool(num_slots: int = 3, length: int = MIN_CAPACITY) -> KVPool:
    """Return a pool with two layers of numbered elements; keys and values differ in width."""
    pool = KVPool(num_slots)
    for layer in range(2):
        key = torch.zeros(num_slots, HEADS, 1, WIDTH)
        value = torch.zeros(num_slots, HEADS, 1, VALUE_WIDTH)
        for buffer in pool.layer(layer, key, value):
            filled = buffer[:, :, :length]
            numbers = torch.arange(filled.numel(), dtype=torch.float32).reshape(filled.shape)
            filled.copy_(numbers + 0.5 * layer)
    return pool


def content(pool: KVPool) -> list[Tensor]:
    return [*pool.keys.values(), *pool.values.values()]


def test_capacity_grows_by_half_and_keeps_what_is_stored() -> None:
    pool = filled_pool()
    before = [buffer.clone() for buffer in content(pool)]
    capacities = set()
    for length in range(1, 5 * MIN_CAPACITY):
        pool.reserve(length)
        assert pool.capacity >= length
        capacities.add(pool.capacity)
    assert sorted(capacities) == [256, 385, 579, 870, 1306]
    assert (pool.growths, pool.retries) == (4, 0)
    for old, new in zip(before, content(pool), strict=True):
        assert new.shape[2] == pool.capacity
        assert torch.equal(new[:, :, :MIN_CAPACITY], old)
        assert not new[:, :, MIN_CAPACITY:].any(), "unwritten entries must stay finite"


@pytest.mark.parametrize("num_slots", [1, 3, 5, 6, 64, 1000, 2 * MAX_RESERVED])
def test_room_ahead_of_use_is_bounded(num_slots: int) -> None:
    pool = KVPool(num_slots)
    assert pool.capacity * num_slots <= max(MAX_RESERVED, num_slots)
    pool.expect(40_000)
    assert pool.capacity * num_slots <= max(MAX_RESERVED, num_slots)
    for length in range(1, 20_000, 7):
        pool.reserve(length)
        ahead = pool.capacity - length
        assert 0 <= ahead * num_slots <= max(MAX_RESERVED, num_slots)


# Number of times that graphs are dropped while a slot grows to 2,064 tokens, 64 for the draft.
GROWTHS = [
    (1, 2064, 0),
    # For example, the limit of the model, of which little is used.
    (1, 131_072, 0),
    (1, 0, 6),
    (3, 2064, 0),
    (8, 2064, 2),
    (64, 2064, 16),
]


@pytest.mark.parametrize(("num_slots", "expected", "growths"), GROWTHS)
def test_growth_is_rare(num_slots: int, expected: int, growths: int) -> None:
    dropped = []
    pool = KVPool(num_slots)
    pool.expect(expected)
    pool.before_resize.append(lambda: dropped.append(pool.capacity))
    for length in range(1, 2065):
        pool.reserve(length)
    assert len(dropped) == growths
    assert pool.capacity <= max(expected, 3 * 2064 // 2)


class Memory:
    """Device with room for `limit` bytes of keys and values."""

    def __init__(self, limit: int, monkeypatch: pytest.MonkeyPatch):
        self.limit, self.used = limit, 0
        make = torch.Tensor.new_zeros

        def new_zeros(like: Tensor, *size: int) -> Tensor:
            made = make(like, *size)
            if self.used + made.nbytes > self.limit:
                raise torch.OutOfMemoryError("no room")
            self.used += made.nbytes
            weakref.finalize(made, self._freed, made.nbytes)
            return made

        monkeypatch.setattr(torch.Tensor, "new_zeros", new_zeros)

    def _freed(self, nbytes: int) -> None:
        self.used -= nbytes


class TestOutOfMemory:
    """Growth on a device that is nearly full."""

    # Bytes of a token in one buffer of `filled_pool`, keys and values on average.
    PER_TOKEN = 3 * HEADS * (WIDTH + VALUE_WIDTH) * 4 // 2

    def pool(self, monkeypatch: pytest.MonkeyPatch, tokens: int) -> KVPool:
        """Return a pool of four buffers on a device with room for `tokens` tokens in each."""
        Memory(4 * tokens * self.PER_TOKEN, monkeypatch)
        return filled_pool()

    def test_stored_pools_are_freed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The freed memory is enough for the required length, but not for regular growth."""
        pool = self.pool(monkeypatch, 500)
        before = [buffer.clone() for buffer in content(pool)]
        net = torch.nn.Linear(1, 1)
        stored = {0: torch.zeros(1).new_zeros(400 * self.PER_TOKEN // 4)}
        graph_store.put(net, StoredGraphs("a", None, 1, (stored, {}), {}, None))
        del stored
        pool.reserve(MIN_CAPACITY + 100)
        assert graph_store.pop(net, "a", 0) is None
        assert (pool.growths, pool.retries) == (1, 1)
        assert pool.capacity == MIN_CAPACITY + 100 + LITTLE_ROOM
        for old, new in zip(before, content(pool), strict=True):
            assert torch.equal(new[:, :, :MIN_CAPACITY], old)

    def test_room_that_nobody_needs_is_given_back(self) -> None:
        pool = filled_pool()
        before = [buffer.clone() for buffer in content(pool)]
        pool.reserve(100)
        pool.trim()
        assert pool.capacity == 100
        assert pool.growths == 0
        for old, new in zip(before, content(pool), strict=True):
            assert torch.equal(new, old[:, :, :100])

    def test_a_trim_that_fails_leaves_a_capacity_that_all_buffers_have(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool = filled_pool()
        new = pool._new
        made: list[Tensor] = []

        def fails_later(like: Tensor, capacity: int) -> Tensor:
            if len(made) == 2:
                raise torch.OutOfMemoryError("no room")
            made.append(new(like, capacity))
            return made[-1]

        monkeypatch.setattr(pool, "_new", fails_later)
        pool.reserve(100)
        with pytest.raises(torch.OutOfMemoryError):
            pool.trim()
        assert pool.capacity == min(buffer.shape[2] for buffer in content(pool)) == 100

    def test_where_nothing_helps_it_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pool = self.pool(monkeypatch, 300)
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            pool.reserve(1000)


def test_reserve_within_capacity_does_not_copy() -> None:
    pool = filled_pool()
    addresses = [buffer.data_ptr() for buffer in content(pool)]
    pool.reserve(MIN_CAPACITY)
    assert [buffer.data_ptr() for buffer in content(pool)] == addresses


def test_a_layer_is_made_once_and_fits_what_is_written() -> None:
    pool = KVPool(2)
    key = torch.zeros(1, HEADS, 5, WIDTH, dtype=torch.float64)
    value = torch.zeros(1, HEADS, 5, VALUE_WIDTH, dtype=torch.float64)
    keys, values = pool.layer(4, key, value)
    assert keys.shape == (2, HEADS, MIN_CAPACITY, WIDTH)
    assert values.shape == (2, HEADS, MIN_CAPACITY, VALUE_WIDTH)
    assert keys.dtype == torch.float64
    assert pool.layer(4, key, value)[0] is keys
    per_token = HEADS * (WIDTH + VALUE_WIDTH)
    assert pool.nbytes() == 2 * MIN_CAPACITY * per_token * keys.element_size()


def test_keys_and_values_have_one_dtype() -> None:
    """Under autocast those of a layer may differ."""
    pool = KVPool(1)
    buffers = pool.layer(0, torch.ones(1, HEADS, 2, WIDTH), torch.ones(1, HEADS, 2, WIDTH).half())
    assert {buffer.dtype for buffer in buffers} == {torch.float16}


@pytest.mark.parametrize("source", [[4, 6, 9], [5, 4, 3], [3]], ids=["gaps", "backwards", "one"])
def test_move_copies_one_slot_and_nothing_else(source: list[int]) -> None:
    pool = filled_pool()
    expected = [buffer.clone() for buffer in content(pool)]
    for buffer in expected:
        buffer[1, :, 3 : 3 + len(source)] = buffer[1][:, source]
    pool.move_rows([(1, source, 3)])
    for moved, right in zip(content(pool), expected, strict=True):
        assert torch.equal(moved, right)


@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "gemma3"])
def test_load_and_export_go_round(name: str) -> None:
    """A cache filled by plain generate() comes back with every real token that it stored."""
    model = tiny_models.build(name)
    batch = tiny_models.ragged_batch()
    mask = batch["attention_mask"].bool()
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(**batch, **{CACHE_NAME: cache}, use_cache=True)
    lengths = mask.sum(dim=1).tolist()
    assert any(layer.keys.shape[2] < mask.shape[1] for layer in cache.layers) == (name != "llama")

    pool = KVPool(len(lengths))
    pool.load(cache, list(mask))
    back = pool.export(DynamicCache(config=model.config), list(mask), lengths)

    assert back.get_seq_length() == cache.get_seq_length()
    for old, new in zip(cache.layers, back.layers, strict=True):
        assert type(old) is type(new)
        assert old.keys.shape == new.keys.shape
        real = mask[:, mask.shape[1] - old.keys.shape[2] :]
        for row, kept in enumerate(real):
            assert torch.equal(old.keys[row][:, kept], new.keys[row][:, kept])
            assert torch.equal(old.values[row][:, kept], new.values[row][:, kept])


def test_load_puts_a_row_at_the_start_of_its_slot() -> None:
    cache = DynamicCache()
    keys = torch.arange(2 * 1 * 4 * 1, dtype=torch.float32).reshape(2, 1, 4, 1)
    cache.update(keys, -keys, 0)
    pool = KVPool(2)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]).bool()
    pool.load(cache, list(mask))
    assert pool.keys[0][0, 0, :2, 0].tolist() == [2, 3]
    assert pool.values[0][1, 0, :4, 0].tolist() == [-4, -5, -6, -7]


def test_plain_and_sliding_caches_are_reusable() -> None:
    check_reusable(DynamicCache())
    check_reusable(DynamicCache(config=tiny_models.build("gemma3").config))


@pytest.mark.parametrize("kind", ["tuple", "static", "offloaded"])
def test_other_caches_are_refused(kind: str) -> None:
    config = tiny_models.build("llama").config
    cache: object
    if kind == "tuple":
        cache = ((torch.zeros(1), torch.zeros(1)),)
    elif kind == "static":
        cache = StaticCache(config=config, max_cache_len=16)
    else:
        cache = type("OffloadedCache", (DynamicCache,), {})()
    with pytest.raises(UnsupportedError, match=type(cache).__name__):
        check_reusable(cache)
