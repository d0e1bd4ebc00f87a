"""The published trees are read as they were printed, each by its own method alone."""

from __future__ import annotations

from collections import Counter

import pytest

from hf_spec.drafting.published_trees import published_trees


def test_every_method_sees_its_own() -> None:
    assert list(published_trees("falcon")) == ["falcon-vicuna", "falcon-llama"]
    assert list(published_trees("sdsat")) == [f"sdsat-{n}" for n in (5, 7, 9, 11, 13)]
    assert published_trees("draft") == {}
    assert published_trees("") == {}


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("falcon-vicuna", [19, 15, 18, 22, 20, 22, 18, 22]),
        ("falcon-llama", [20, 19, 19, 15, 16, 10, 10, 9]),
    ],
)
def test_those_of_falcon(name: str, counts: list[int]) -> None:
    published = published_trees("falcon")[name]
    assert published.block_size == 2
    assert list(Counter(published.tree.depths).values()) == counts


def test_spelled_paths() -> None:
    vicuna, llama = (published.tree.paths for published in published_trees("falcon").values())
    assert (18,) in vicuna
    assert (0,) * 7 + (11,) in vicuna
    assert (0, 10) in llama
    assert [path[2] for path in llama if path[:2] == (0, 1) and len(path) == 3] == [
        *[0, 3, 4, 5, 6, 7, 8, 9]
    ]


@pytest.mark.parametrize(("height", "num_nodes"), [(5, 28), (7, 36), (9, 46), (11, 60), (13, 76)])
def test_those_of_sdsat(height: int, num_nodes: int) -> None:
    published = published_trees("sdsat")[f"sdsat-{height}"]
    assert (len(published.tree), published.tree.height) == (num_nodes, height)
    assert published.block_size == height
