"""Rows of equal shape attend in one call, with the same bits as each of them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hf_spec_kernels import Scoring
from torch.nn import functional as F

from hf_spec.engine.forward import attention_span, sdpa_attention
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kernel_layout import slot_mapping
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.packing import pack
from hf_spec.engine.forward.padded_batching import PaddedWork
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.forward.sdpa_attention import (
    MAX_COPIED_KEYS,
    attend,
    group_segments,
    store,
    write_target,
)
from hf_spec.engine.forward.step import PackedStep

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 4, 2, 8
FORK = ([8, 20, 21], [-1, 0, 0])
TREE = DraftTree.from_rows([FORK, FORK, ([8, 20, 21], [-1, 0, 1]), FORK])
SCORINGS = {
    "plain": Scoring(),
    "window": Scoring(window=3),
    "softcap": Scoring(softcap=1.5),
    "sinks": Scoring(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "chunk": Scoring(chunk=4),
    "softcap and window": Scoring(softcap=1.5, window=3),
}


def rows(stored: int = 5) -> list[RowWork]:
    """Return four rows; all but the third are alike."""
    return [RowWork(row, stored, [3, 4], list(TREE.nodes(row)), [0, 1, 2], 3) for row in range(4)]


def test_rows_are_together_where_they_look_at_equal_entries() -> None:
    inputs = pack(rows(), TREE)
    groups = group_segments(inputs.segments)
    assert [group.first.num_keys for group in groups] == [7, 10, 7, 10]
    chains, forks, _, other = groups
    assert chains.slots.tolist() == forks.slots.tolist() == [0, 1, 3]
    assert forks.tokens.tolist() == [2, 3, 4, 7, 8, 9, 17, 18, 19]
    assert (other.slots, other.tokens) == (slice(2, 3), slice(12, 15))


@pytest.mark.parametrize(
    "change",
    [{"stored": 6}, {"pending": [3]}, {"offsets": [0, 2, 1]}, {"stored_indices": [0, 1, 2, 3, 5]}],
)
def test_rows_that_differ_are_apart(change: dict[str, Any]) -> None:
    work = rows()[:2]
    work[1] = PaddedWork(**vars(work[1]) | change)
    assert len(group_segments(pack(work, TREE).segments)) == 4


def test_padding_of_idle_rows_keeps_its_own_entries() -> None:
    idle = [PaddedWork(row, 4, [], first_index=first, fill=2) for row, first in ((2, 6), (3, 9))]
    inputs = pack([*rows()[:2], *idle], TREE)
    assert [s.cache_indices for s in inputs.segments[4:]] == [range(6, 8), range(9, 11)]


def test_of_long_rows_no_key_is_copied() -> None:
    groups = group_segments(pack(rows(MAX_COPIED_KEYS), TREE).segments)
    assert [group.slots for group in groups] == [slice(n // 2, n // 2 + 1) for n in range(8)]


@pytest.mark.parametrize("name", SCORINGS)
def test_together_they_attend_as_each_alone(name: str) -> None:
    torch.manual_seed(0)
    inputs = pack(rows(), TREE)
    total = len(inputs.tokens)
    query = torch.randn(1, HEADS, total, WIDTH)
    new = torch.randn(1, KV_HEADS, total, WIDTH)
    pool = KVPool(4)
    keys, values = pool.layer(0, new, new)
    keys.normal_()
    values.normal_()
    step = PackedStep(pool, inputs.segments)
    store(step.target(CPU), new, keys)
    apart = [group for segment in inputs.segments for group in group_segments([segment])]
    assert len(apart) > len(step.groups)
    scoring = SCORINGS[name]
    expected = attend(apart, query, keys, values, scoring)
    assert torch.equal(attend(step.groups, query, keys, values, scoring), expected)


def test_states_are_stored_as_if_written_row_by_row() -> None:
    inputs = pack(rows(), TREE)
    step = PackedStep(KVPool(4), inputs.segments)
    states = torch.randn(1, KV_HEADS, len(inputs.tokens), WIDTH)
    joint, apart = (torch.zeros(4, KV_HEADS, 16, WIDTH) for _ in range(2))
    store(step.target(CPU), states, joint)
    for segment in inputs.segments:
        target = write_target(slot_mapping([(segment.slot, segment.cache_indices)]), CPU)
        assert isinstance(target[1], slice)
        store(target, states[:, :, segment.start : segment.end], apart)
    assert torch.equal(joint, apart)
    assert bool(apart.any())


def test_states_of_another_dtype_are_taken() -> None:
    """Under autocast a layer's values may be in half precision while its queries are not."""
    inputs = pack(rows(), TREE)
    step = PackedStep(KVPool(4), inputs.segments)
    states = torch.randn(1, HEADS, len(inputs.tokens), WIDTH)
    buffer = torch.zeros(4, KV_HEADS, 16, WIDTH, dtype=torch.bfloat16)
    store(step.target(CPU), states[:, :KV_HEADS], buffer)
    assert bool(buffer.any())
    with torch.autocast("cpu", torch.bfloat16):
        assert attend(step.groups, states, buffer, buffer, Scoring()).dtype == torch.float32


def test_a_step_of_equal_rows_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(args[0]))
        return F.scaled_dot_product_attention(*args, **kwargs)

    class Counting:
        scaled_dot_product_attention = staticmethod(counted)

    monkeypatch.setattr(sdpa_attention, "F", Counting)
    inputs = pack(rows()[:2], TREE)
    states = torch.randn(1, KV_HEADS, len(inputs.tokens), WIDTH)
    buffer = torch.randn(4, KV_HEADS, 16, WIDTH)
    attend(group_segments(inputs.segments), states, buffer, buffer, Scoring())
    assert calls == [2, 2]


def test_a_level_of_one_row_is_stored_where_its_nodes_are() -> None:
    """The root and node 2 run; the entry of node 1 stays as it is."""
    work = RowWork(1, 5, [], list(TREE.nodes(1))[::2], [0, 2], 3)
    step = PackedStep(KVPool(4), pack([work], TREE).segments)
    states, buffer = torch.randn(1, KV_HEADS, 2, WIDTH), torch.zeros(4, KV_HEADS, 16, WIDTH)
    store(step.target(CPU), states, buffer)
    assert torch.equal(buffer[1, :, [5, 7]], states[0])
    assert int(buffer.any(dim=-1).sum()) == 2 * KV_HEADS


@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize("stored", [0, 5])
def test_a_prompt_attends_in_blocks_as_token_by_token(
    name: str, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is next to a short row, and its last block is not full."""
    tree = DraftTree.from_rows([([8], [-1]), ([8], [-1])])
    work = [RowWork(0, stored, [*range(11)], [0], [0], 1), RowWork(1, 3, [7], [1], [0], 1)]
    step = PackedStep(KVPool(2), pack(work, tree).segments)
    torch.manual_seed(0)
    query, keys = torch.randn(1, HEADS, 14, WIDTH), torch.randn(2, KV_HEADS, 32, WIDTH)
    values = torch.randn(2, KV_HEADS, 32, WIDTH // 2)
    expected = attend(step.groups, query, keys, values, SCORINGS[name])
    monkeypatch.setattr(attention_span, "STEP_TOKENS", 10)
    monkeypatch.setattr(sdpa_attention, "BLOCK", 4)
    assert [segment.is_prompt for segment in step.segments] == [True, False, False, False]
    found = attend(step.groups, query, keys, values, SCORINGS[name])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def test_a_prompt_with_gaps_attends_by_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_span, "STEP_TOKENS", 1)
    indices = [0, 1, 2, 3, 5]
    work = PaddedWork(0, 5, [3, 4], [0], [0], 1, stored_indices=indices, first_index=6)
    assert not any(segment.is_prompt for segment in work.segments(TREE))
