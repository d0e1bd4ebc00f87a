"""The nucleus without a sort: the reference against transformers, the kernel against it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hf_spec_kernels import filter_top_p, launches, using, verify_tree
from torch import Tensor
from transformers import TopPLogitsWarper

from hf_spec.engine.decode.logits_processors import NodeProcessors

IDS = torch.zeros(1, 1, dtype=torch.long)


def random_scores(rows: int, vocab: int) -> Tensor:
    torch.manual_seed(vocab)
    return torch.randn(rows, vocab) * 3


def test_the_reference() -> None:
    scores = random_scores(5, 700)
    found = filter_top_p(scores, 0.8, impl="torch")
    assert torch.equal(found, TopPLogitsWarper(0.8)(IDS, scores))
    assert 1 < int(found.isfinite().sum(dim=-1).min()) < 700


@pytest.mark.by_default(vocab=lambda vocab: vocab == 9001)
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("vocab", [1, 17, 1000, 9001])
def test_the_kernel(vocab: int, top_p: float, device: torch.device) -> None:
    scores = random_scores(3, vocab).to(device)
    before, given = launches["top_p"], scores.clone()
    found = filter_top_p(scores, top_p, impl="triton")
    assert launches["top_p"] == before + 1
    assert torch.equal(scores, given)
    if top_p < 1:
        assert torch.equal(found, filter_top_p(scores, top_p, impl="torch"))
    else:
        assert torch.equal(found, scores), "every token has a probability"


@pytest.mark.parametrize("top_p", [0.0, 0.35, 0.6, 0.85])
def test_equal_scores(top_p: float, device: torch.device) -> None:
    """As bfloat16 logits have them; also of both signs of zero, and across blocks."""
    torch.manual_seed(0)
    few = torch.randint(-2, 3, (4, 5000)).float() * 2.0
    few[1, few[1] == 0] *= -1
    few[2, ::2] = -0.0
    few[3] = 1.0
    few[:, -3:] = 12.0
    found = filter_top_p(few.to(device), top_p, impl="triton").cpu()
    expected = filter_top_p(few, top_p, impl="torch")
    # Sums of 5000 float32 weights differ by rounding, which moves the border by single tokens.
    kept, wanted = found.isfinite(), expected.isfinite()
    assert (kept != wanted).sum(dim=-1).max() <= 2
    for row in range(4):
        border = few[row][kept[row]].min()
        tied = kept[row][few[row] == border].long()
        assert torch.equal(tied, tied.sort().values), "the first of equals are removed"


def test_few_equal_scores_exactly(device: torch.device) -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, -1.0]], device=device)
    for top_p in (0.2, 0.45, 0.75, 0.85, 0.95):
        found = filter_top_p(scores, top_p, impl="triton")
        assert torch.equal(found, filter_top_p(scores, top_p, impl="torch")), top_p


def test_undefined_rows_are_left_alone(device: torch.device) -> None:
    scores = random_scores(4, 50).to(device)
    scores[0, 7], scores[1, 3], scores[2] = torch.nan, torch.inf, -torch.inf
    scores[3, :40] = -torch.inf
    found = filter_top_p(scores, 0.5, impl="triton")
    assert torch.equal(found[:3].nan_to_num(5), scores[:3].nan_to_num(5))
    assert torch.equal(found[3], filter_top_p(scores[3:], 0.5, impl="torch")[0])


def test_another_filter_value_and_stride(device: torch.device) -> None:
    scores = random_scores(3, 120).to(device)[:, :100]
    found = filter_top_p(scores, 0.5, -7.0, impl="triton")
    assert torch.equal(found, filter_top_p(scores, 0.5, -7.0, impl="torch"))
    assert int((found == -7.0).sum()) > 100


@pytest.mark.parametrize("least", [1, 5])
def test_processors_of_nodes_use_it(least: int, device: torch.device) -> None:
    scores = random_scores(3, 90).to(device)
    warper = TopPLogitsWarper(0.3, min_tokens_to_keep=least)
    before = launches["top_p"]
    with using("triton"):
        found = NodeProcessors([warper], 1)([0, 0, 0], None, scores.clone())
    assert torch.equal(found, warper(IDS, scores))
    assert launches["top_p"] - before == (least == 1)


def one_too_few(scores: Tensor) -> Tensor:
    """A wrong nucleus, without its least probable token."""
    found = filter_top_p(scores, 0.8, impl="triton")
    least = found.masked_fill(found.isinf(), torch.inf).argmin(dim=-1, keepdim=True)
    return found.scatter(1, least, -torch.inf)


@pytest.mark.parametrize(
    ("nucleus", "right"),
    [(lambda scores: filter_top_p(scores, 0.8, impl="triton"), True), (one_too_few, False)],
)
def test_drawn_tokens_have_the_distribution(
    nucleus: Callable[[Tensor], Tensor], right: bool, device: torch.device
) -> None:
    torch.manual_seed(3)
    scores, draws = torch.randn(1, 30), 20_000
    expected = TopPLogitsWarper(0.8)(IDS, scores).softmax(dim=-1)[0]
    # Every node is a root, so that the verdict draws a token after each.
    nodes = torch.arange(draws, device=device)
    filtered = nucleus(scores.to(device)).expand(draws, -1)
    tree = nodes * 0 - 2, nodes * 0 - 1, torch.arange(draws + 1, device=device)
    drawn = verify_tree(filtered, *tree, 1, torch.rand(draws, device=device), impl="torch").bonus
    counts = drawn.bincount(minlength=30).cpu().double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    mean = draws * expected[possible].double()
    statistic = float(((counts[possible] - mean) ** 2 / mean).sum())
    # Chi-squared: its mean is the number of degrees of freedom, its variance twice that.
    degrees = int(possible.sum()) - 1
    assert (statistic < degrees + 4 * (2 * degrees) ** 0.5) == right
