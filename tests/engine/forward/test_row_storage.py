"""Cache indices of tokens: each row on its own, or all rows aligned with gaps."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.padded_batching import BATCHING, make_storage
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.forward.row_storage import RowStorage

PROMPTS = [[1, 2, 3, 4, 5], [6, 7]]


def storage(batching: str = "padded") -> RowStorage:
    rows = make_storage(2, batching)
    # One layer, one head, one dimension: each token is stored as its own id.
    like = torch.zeros(2, 1, 1, 1)
    rows.pool.layer(0, like, like)
    return rows


def chains(texts: list[list[int]], lengths: list[int]) -> DraftTree:
    """Draft a chain of `lengths` tokens after the last token of each text, numbered 100 and up."""
    rows = []
    for text, length in zip(texts, lengths, strict=True):
        tokens = [text[-1], *range(100, 100 + length)]
        rows.append((tokens, list(range(-1, length))))
    return DraftTree.from_rows(rows)


def step(
    rows: RowStorage, texts: list[list[int]], drafted: list[int], accepted: list[int]
) -> list[RowWork]:
    """Run one round: all nodes run, `accepted` drafts are kept, and a bonus token follows."""
    tree = chains(texts, drafted)
    nodes = range(tree.num_nodes)
    work = rows.plan(tree, texts, nodes)
    for w in work:
        for entry, token in zip(w.cache_indices, w.tokens(tree), strict=True):
            rows.pool.keys[0][w.row, 0, entry] = token
    rows.mark_ran(work)
    rows.keep([list(range(1, count + 1)) for count in accepted])
    for text, count in zip(texts, accepted, strict=True):
        text += [*range(100, 100 + count), 50]
    return work


def stored(rows: RowStorage, row: int, length: int) -> list[int]:
    return rows.pool.keys[0][row, 0, :length, 0].int().tolist()


def test_every_row_goes_on_behind_its_own_tokens() -> None:
    rows, texts = storage("unpadded"), [list(prompt) for prompt in PROMPTS]
    step(rows, texts, [5, 2], [3, 0])
    work = step(rows, texts, [2, 5], [1, 5])
    assert [w.root_index for w in work] == [8, 2]
    assert {type(w) for w in work} == {RowWork}
    assert rows.stored == [10, 8]
    assert stored(rows, 0, 10) == texts[0][:-1]
    assert stored(rows, 1, 8) == texts[1][:-1]


def test_levels_of_one_round_share_its_start() -> None:
    """A draft model runs its tree in several forward passes; only the first has pending tokens."""
    rows, texts = storage(), [list(prompt) for prompt in PROMPTS]
    tree = chains(texts, [1, 1])
    for nodes in ([0, 2], [1, 3]):
        work = rows.plan(tree, texts, nodes)
        assert [w.root_index for w in work] == [4, 4]
        rows.mark_ran(work)
    assert [w.num_keys for w in work] == [6, 6]
    rows.keep([[1], []])
    assert rows.stored == [6, 2]


@pytest.mark.parametrize(("path", "kept"), [([2], [2]), ([1, 3], [1, 3]), ([2, 4], [2])])
def test_accepted_nodes_move_together_up_to_one_that_never_ran(
    path: list[int], kept: list[int]
) -> None:
    """Node 4 is a leaf, which a draft model does not run."""
    rows, text = storage("unpadded"), [7, 8, 9]
    tree = DraftTree.from_rows([([9, 20, 21, 22, 23], [-1, 0, 0, 1, 2]), ([], [])])
    (work,) = rows.plan(tree, [text, []], [0, 1, 2, 3])
    rows.pool.keys[0][0, 0, work.cache_indices, 0] = torch.tensor(work.tokens(tree)).float()
    rows.mark_ran([work])
    assert rows.keep([path, []]) == {0: [0, *kept]}
    assert stored(rows, 0, rows.stored[0]) == [*text, *(tree.tokens[node] for node in kept)]


@pytest.mark.parametrize("batching", BATCHING)
def test_a_row_that_restarts_holds_nothing(batching: str) -> None:
    rows, texts = storage(batching), [list(prompt) for prompt in PROMPTS]
    step(rows, texts, [2, 2], [1, 2])
    rows.restart(1)
    assert rows.stored == [6, 0]
    texts[1] = [30, 31, 32]
    step(rows, texts, [0, 0], [0, 0])
    work = step(rows, texts, [0, 0], [0, 0])
    entries = (work[1].key_positions() >= 0).nonzero()[:, 0].tolist()
    values = stored(rows, 1, work[1].root_index)
    assert [values[entry] for entry in entries] == [30, 31, 32]


@pytest.mark.parametrize("batching", BATCHING)
def test_an_exported_cache_has_no_gaps(batching: str) -> None:
    rows, texts = storage(batching), [list(prompt) for prompt in PROMPTS]
    step(rows, texts, [5, 2], [3, 0])
    step(rows, texts, [2, 5], [1, 5])
    cache = DynamicCache()
    masks = [torch.ones(10).bool(), torch.tensor([0, 0, *[1] * 8]).bool()]
    rows.export(cache, masks)
    keys = cache.layers[0].keys[:, 0, :, 0].int().tolist()
    assert keys == [texts[0][:-1], [0, 0, *texts[1][:-1]]]


@pytest.mark.parametrize("batching", BATCHING)
def test_a_loaded_cache_is_gone_on_from(batching: str) -> None:
    cache = DynamicCache()
    states = torch.tensor([[1.0, 2, 3, 4], [0, 0, 6, 7]]).reshape(2, 1, 4, 1)
    cache.update(states, states, 0)
    rows = storage(batching)
    rows.load(cache, [torch.ones(4).bool(), torch.tensor([0, 0, 1, 1]).bool()])
    assert rows.stored == [4, 2]
    texts = [[1, 2, 3, 4, 5], [6, 7, 8]]
    step(rows, texts, [0, 0], [0, 0])
    work = step(rows, texts, [0, 0], [0, 0])
    assert [w.root_index for w in work] == ([5, 5] if BATCHING[batching].pads_kv else [5, 3])
    entries = (work[1].key_positions() >= 0).nonzero()[:, 0].tolist()
    assert [stored(rows, 1, 5)[entry] for entry in entries] == [6, 7, 8]


def test_what_is_shortened_is_forgotten() -> None:
    rows, texts = storage(), [list(prompt) for prompt in PROMPTS]
    step(rows, texts, [2, 2], [2, 2])
    rows.shorten(1, 3)
    assert rows.stored == [7, 3]
    work = step(rows, texts, [0, 0], [0, 0])
    assert work[1].pending == texts[1][3:-2]


@pytest.mark.parametrize("batching", ["unpadded", "padded"])
def test_the_past_of_a_row_is_what_it_holds(batching: str) -> None:
    rows = storage(batching)
    texts = [list(text) for text in PROMPTS]
    step(rows, texts, drafted=[2, 1], accepted=[1, 0])
    indices = getattr(rows, "_stored_indices", [[], []])
    for row in (0, 1):
        past = rows.stored_row(row)
        assert past.stored == rows.stored[row]
        entries = past.key_positions()
        held = (entries >= 0).nonzero()[:, 0].tolist()
        assert entries[held].tolist() == list(range(rows.stored[row]))
        assert held == (indices[row] or held)


def test_offsets_of_positions_end_with_their_sequence() -> None:
    rows = storage("unpadded")
    texts = [list(prompt) for prompt in PROMPTS]
    rows.position_offsets = [-3, 2]
    offsets = [work.position_offset for work in step(rows, texts, [0, 0], [0, 0])]
    assert offsets == [-3, 2]
    rows.restart(0)
    assert rows.position_offsets == [0, 2]
