"""Packed passes of a Falcon head equal passes over whole texts, however the pairs arrive."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_spec import UnsupportedError
from hf_spec.drafting.rank_tree import Path, RankTree
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from hf_spec.methods.feature_pairs import runner as pair_runner
from hf_spec.methods.feature_pairs.runner import HeadRunner, PairRow, draft_blocks, extend_rows
from tests.drafting.test_rank_tree import random_paths
from tests.falcon_reference import HEADS, random_head
from tests.model_watch import snapshot
from tests.tiny_models import VOCAB, build


def text(seed: int, length: int) -> tuple[list[int], Tensor]:
    """Return the `length` + 1 tokens and the features of `length` pairs."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (length + 1,), generator=generator).tolist()
    return tokens, torch.randn(length, 32, generator=generator)


@torch.no_grad()
def newest(head: FalconHead, tokens: list[int], features: Tensor) -> Tensor:
    """Return (k, H) from a pass over the whole text, with blocks counted from its end."""
    size = head.shape.block_size
    ids = torch.tensor([tokens[1 : len(features) + 1]])
    return head(ids, features[None], len(features) % size)[0, -size:]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class TestFeed:
    @pytest.mark.parametrize(
        ("name", "size", "recurrent"), [*HEADS, ("gpt_oss", 2, True), ("gpt_oss", 4, False)]
    )
    @torch.no_grad()
    def test_ragged_rows_equal_whole_texts(self, name: str, size: int, recurrent: bool) -> None:
        """With one layer, stored keys and values do not depend on the block grid."""
        head = random_head(name, size, 1, recurrent)
        texts = [text(row, 30) for row in range(3)]
        tokens = [mine for mine, _ in texts]
        rows = [PairRow(row, torch.zeros(0), 0) for row in range(3)]
        known = [0, 0, 0]
        found = []
        # First the prompts, then rounds that accept no tokens, a few, or more than k.
        with HeadRunner(head, 3).active() as runner:
            for counts in ([5, 12, 4], [1, 1, 1], [1, 3, 2], [6, 1, 1], [2, 5, 1], [1, 1, 7]):
                for row, count in enumerate(counts):
                    extend_rows([rows[row]], [texts[row][1][known[row] : known[row] + count]])
                    known[row] += count
                outputs, _ = runner.feed(rows, tokens)
                found.append((list(known), outputs))
                assert [row.stored for row in rows] == known
                assert [len(row.features) for row in rows] == [size - 1] * 3
        assert runner.forwards == len(found)
        for lengths, outputs in found:
            for row, length in enumerate(lengths):
                close(outputs[row], newest(head, tokens[row], texts[row][1][:length]))

    @pytest.mark.parametrize(("size", "recurrent"), [(1, True), (2, False), (3, True), (4, False)])
    @torch.no_grad()
    def test_long_prompts_run_in_stretches(
        self, size: int, recurrent: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pair_runner, "FEED_CHUNK", 8)
        head = random_head("llama", size, 2, recurrent)
        texts = [text(row, length) for row, length in enumerate((29, 6, 18))]
        rows = [PairRow(row, torch.zeros(0), 0) for row in range(3)]
        for row, (_, features) in zip(rows, texts, strict=True):
            extend_rows([row], [features])
        with HeadRunner(head, 3).active() as runner:
            outputs, _ = runner.feed(rows, [tokens for tokens, _ in texts])
        for output, (tokens, features) in zip(outputs, texts, strict=True):
            close(output, newest(head, tokens, features))
        assert runner.forwards > 3

    @torch.no_grad()
    def test_a_text_that_begins_later_keeps_its_positions(self) -> None:
        head = random_head("gpt2", 2, 1)
        tokens, features = text(0, 9)
        mixed, _ = head.mix(torch.tensor([tokens[4:10]]), features[None, 3:])
        mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
        mask[0, 0] = (torch.arange(6) // 2)[:, None] >= torch.arange(6) // 2
        expected = head.attend(mixed, attention_mask=mask, position_ids=torch.arange(3, 9)[None])
        row = PairRow(0, torch.zeros(0), 3)
        extend_rows([row], [features[3:]])
        with HeadRunner(head, 1).active() as runner:
            close(runner.feed([row], [tokens])[0][0], expected[0, -2:])


class TestActive:
    @pytest.mark.parametrize("name", ["llama", "gemma3"])
    def test_the_head_is_left_as_it_was(self, name: str) -> None:
        head = random_head(name)
        before = snapshot(head.attention), snapshot(build(name))
        tokens, features = text(0, 6)
        row = PairRow(0, torch.zeros(0), 0)
        extend_rows([row], [features])
        with torch.no_grad(), HeadRunner(head, 1).active() as runner:
            runner.feed([row], [tokens])
        assert (snapshot(head.attention), snapshot(build(name))) == before

    def test_no_attention_interface(self) -> None:
        head = FalconHead(build("bloom"), FalconShape(2, 1), None).eval()
        with pytest.raises(UnsupportedError, match="takes no attention function"):
            HeadRunner(head, 1).active().__enter__()


def test_lists_are_sorted_and_in_target_tokens() -> None:
    vocabulary = torch.tensor([3, 10, 50, 90])
    head = FalconHead(build("llama"), FalconShape(2, 1), vocabulary).eval()
    features = torch.randn(6, 32)
    tokens, likely, probs = HeadRunner(head, 1).top_tokens(features, 3)
    expected = build("llama").lm_head(features)[:, vocabulary].softmax(dim=-1)
    close(probs, expected)
    best = expected.argsort(dim=-1, descending=True)[:, :3]
    assert torch.equal(tokens, vocabulary[best])
    close(likely, expected.gather(1, best))


def blocks_of(tree: RankTree, size: int, index: int) -> list[Path]:
    """Return the paths to the blocks of a pass: its start nodes that have children."""
    return sorted({path[:-1] for path in tree.paths if len(path) == index * size + 1})


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_blocks_see_their_ancestors_and_themselves(size: int) -> None:
    for seed in range(4):
        check_blocks(RankTree.of(random_paths(seed)), size)


def check_blocks(tree: RankTree, size: int) -> None:
    earlier: list[Path] = []
    parents = [-1]
    for index in range(1, -(-tree.height // size)):
        new = blocks_of(tree, size, index)
        parents += [[(), *earlier].index(path[:-size]) for path in new]
        blocks = draft_blocks(tuple(parents), len(new), size)
        assert blocks.count == len(new)
        assert blocks.offsets[-1] == index * size - 1
        earlier += new
        offsets = [len(path) - size + slot for path in earlier for slot in range(size)]
        assert blocks.offsets.tolist() == offsets
        expected = torch.zeros(len(new) * size, len(earlier) * size, dtype=torch.bool)
        for row, block in enumerate(new):
            for column, other in enumerate(earlier):
                if other == block[: len(other)]:
                    rows = slice(row * size, (row + 1) * size)
                    expected[rows, column * size : (column + 1) * size] = True
        visible = torch.ones_like(expected) if blocks.visible is None else blocks.visible
        assert torch.equal(visible, expected)


def test_a_chain_needs_no_mask() -> None:
    assert draft_blocks((-1, 0, 1, 2), 1, 2).visible is None


def test_blocks_are_made_once() -> None:
    assert draft_blocks((-1, 0), 1, 2) is draft_blocks((-1, 0), 1, 2)
