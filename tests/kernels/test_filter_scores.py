"""Filters without a sort: the reference against transformers, the kernel against the reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hf_spec_kernels import Filter, filter_scores, launches, using, verify_tree
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from hf_spec.engine.decode.logits_processors import NodeProcessors

IDS = torch.zeros(1, 1, dtype=torch.long)
FILTERS = {
    "none": Filter(),
    "temperature": Filter(0.7),
    "top-k": Filter(1.3, 20),
    "top-k of one": Filter(top_k=1),
    "top-k of all": Filter(top_k=10**6),
    "top-p": Filter(removed_share=1 - 0.9),
    "top-p of one": Filter(removed_share=1.0),
    "top-p of all": Filter(removed_share=0.0),
    "top-k and top-p": Filter(0.9, 50, 1 - 0.8),
    "min-p": Filter(min_p=0.05),
    "all": Filter(0.8, 40, 1 - 0.95, 0.02),
}


def random_scores(rows: int, vocab: int) -> Tensor:
    torch.manual_seed(vocab)
    return torch.randn(rows, vocab) * 3


def warpers(chosen: Filter) -> LogitsProcessorList:
    """Return the equivalent logits processors of transformers."""
    found = LogitsProcessorList([TemperatureLogitsWarper(chosen.temperature)])
    if chosen.top_k:
        found.append(TopKLogitsWarper(chosen.top_k))
    if chosen.removed_share >= 0:
        found.append(TopPLogitsWarper(1 - chosen.removed_share))
    if chosen.min_p:
        found.append(MinPLogitsWarper(chosen.min_p))
    return found


def filtered(scores: Tensor, chosen: Filter, impl: str) -> Tensor:
    filters = torch.tensor([chosen], device=scores.device).expand(len(scores), -1)
    return filter_scores(scores, filters, impl=impl)


@pytest.mark.parametrize("name", FILTERS)
def test_the_reference(name: str) -> None:
    scores = random_scores(5, 700)
    found = filtered(scores, FILTERS[name], "torch")
    assert torch.equal(found, warpers(FILTERS[name])(IDS, scores))


@pytest.mark.by_default(vocab=lambda vocab: vocab == 4099, dtype=lambda dtype: dtype.itemsize == 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [1, 17, 1000, 4099])
def test_the_kernel(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Each row has another filter. In bfloat16, many scores tie, also with the last of top-k."""
    scores = random_scores(len(FILTERS), vocab).to(device, dtype)
    filters = torch.tensor([*FILTERS.values()], device=device)
    before, given = launches["filter_scores"], scores.clone()
    found = filter_scores(scores, filters, impl="triton")
    assert launches["filter_scores"] == before + 1
    assert torch.equal(scores, given)
    assert found.dtype == torch.float32
    expected = filter_scores(scores, filters, impl="torch")
    exact = [name != "top-p of all" for name in FILTERS]
    assert torch.equal(found[exact], expected[exact])
    last = [*FILTERS].index("top-p of all")
    assert torch.equal(found[last], scores[last].float()), "every token has a probability"


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_all_that_equal_the_last_of_top_k_stay(impl: str, device: torch.device) -> None:
    """Same as transformers, also for both signs of zero."""
    scores = torch.tensor(
        [[3.0, 1.0, 2.0, 1.0, 1.0, 0.0], [0.0, -0.0, 5.0, 0.0, -1.0, -2.0]], device=device
    )
    for top_k, kept in ((1, [1, 1]), (2, [2, 4]), (3, [5, 4]), (4, [5, 4]), (6, [6, 6])):
        found = filtered(scores, Filter(top_k=top_k), impl)
        assert found.isfinite().sum(dim=-1).tolist() == kept, top_k
        assert torch.equal(found, TopKLogitsWarper(top_k)(IDS, scores))


@pytest.mark.parametrize("top_p", [0.0, 0.35, 0.6, 0.85])
def test_equal_scores(top_p: float, device: torch.device) -> None:
    """Scores tie as in bfloat16 logits, also with both signs of zero and across blocks."""
    torch.manual_seed(0)
    few = torch.randint(-2, 3, (4, 5000)).float() * 2.0
    few[1, few[1] == 0] *= -1
    few[2, ::2] = -0.0
    few[3] = 1.0
    few[:, -3:] = 12.0
    chosen = Filter(removed_share=1 - top_p)
    found = filtered(few.to(device), chosen, "triton").cpu()
    expected = filtered(few, chosen, "torch")
    # Sums of 5000 float32 weights differ by rounding, which moves the border by single tokens.
    kept, wanted = found.isfinite(), expected.isfinite()
    assert (kept != wanted).sum(dim=-1).max() <= 2
    for row in range(4):
        border = few[row][kept[row]].min()
        tied = kept[row][few[row] == border].long()
        assert torch.equal(tied, tied.sort().values), "the first of equals are removed"


def test_few_equal_scores_exactly(device: torch.device) -> None:
    scores = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, -1.0]], device=device)
    for top_k in (0, 3):
        for top_p in (0.2, 0.45, 0.75, 0.85, 0.95):
            chosen = Filter(top_k=top_k, removed_share=1 - top_p)
            found = filtered(scores, chosen, "triton")
            assert torch.equal(found, filtered(scores, chosen, "torch")), (top_k, top_p)
            assert torch.equal(found, warpers(chosen)(IDS, scores)), (top_k, top_p)


# In the interpreter, NumPy warns about differences of infinities that are not used.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", ["top-k", "top-p", "min-p", "all"])
def test_undefined_rows(name: str, device: torch.device) -> None:
    """Top-k filters them, too: NaN is larger than everything, and nothing is smaller than NaN."""
    scores = random_scores(6, 50).to(device)
    scores[0, 7], scores[1, 3], scores[2] = torch.nan, torch.inf, -torch.inf
    scores[3, :40] = -torch.inf
    scores[4], scores[5, ::2] = torch.nan, torch.nan
    found = filtered(scores, FILTERS[name], "triton")
    for impl in (filtered(scores, FILTERS[name], "torch"), warpers(FILTERS[name])(IDS, scores)):
        assert torch.equal(found.nan_to_num(5), impl.nan_to_num(5))
    assert torch.equal(found.isnan(), scores.isnan())


def test_another_stride_and_padding(device: torch.device) -> None:
    scores = random_scores(3, 120).to(device)[:, :100]
    filters = torch.tensor([FILTERS["all"], Filter(0.0), FILTERS["top-k"]], device=device)
    found = filter_scores(scores, filters, impl="triton")
    expected = filter_scores(scores, filters, impl="torch")
    assert torch.equal(found[::2], expected[::2])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"scores": torch.zeros(2, 9).double()}, TypeError, "scores is torch.float64"),
        ({"filters": torch.zeros(3, 4)}, ValueError, "filters has shape"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(
    change: dict[str, Tensor], error: type[Exception], match: str, device: torch.device
) -> None:
    given = {"scores": torch.zeros(2, 9), "filters": torch.ones(2, 4), **change}
    with pytest.raises(error, match=match):
        filter_scores(**{name: value.to(device) for name, value in given.items()}, impl="triton")


# Processors in the order of the call, and the number of launches of the kernel.
ORDERS: dict[str, tuple[Sequence[Any], int]] = {
    "as generate() has them": (warpers(FILTERS["all"]), 1),
    "another order": ([TopPLogitsWarper(0.9), TopKLogitsWarper(5)], 2),
    "twice the same": ([TopKLogitsWarper(9), TopKLogitsWarper(5)], 2),
    "another between": ([TopKLogitsWarper(9), TypicalLogitsWarper(0.9), MinPLogitsWarper(0.1)], 2),
    "several tokens stay": ([TopPLogitsWarper(0.3, min_tokens_to_keep=5)], 0),
    "another filter value": ([TopKLogitsWarper(5, filter_value=-9.0)], 0),
}


@pytest.mark.parametrize("name", ORDERS)
def test_processors_of_nodes_use_it(name: str, device: torch.device) -> None:
    processors, number = ORDERS[name]
    scores = random_scores(3, 90).to(device)
    before = launches["filter_scores"]
    with using("triton"):
        found = NodeProcessors(processors, 1)([0, 0, 0], None, scores.clone())
    assert torch.equal(found, LogitsProcessorList(processors)(IDS, scores))
    assert launches["filter_scores"] - before == number


def one_too_few(scores: Tensor) -> Tensor:
    """Return scores of a wrong filter, which also removes its least probable token."""
    found = filtered(scores, TESTED, "triton")
    least = found.masked_fill(found.isinf(), torch.inf).argmin(dim=-1, keepdim=True)
    return found.scatter(1, least, -torch.inf)


TESTED = Filter(1.2, 12, 1 - 0.9)


@pytest.mark.parametrize(
    ("chosen", "right"),
    [(lambda scores: filtered(scores, TESTED, "triton"), True), (one_too_few, False)],
)
def test_drawn_tokens_have_the_distribution(
    chosen: Callable[[Tensor], Tensor], right: bool, device: torch.device
) -> None:
    torch.manual_seed(3)
    scores, draws = torch.randn(1, 30), 4000
    expected = warpers(TESTED)(IDS, scores).softmax(dim=-1)[0]
    # Every node is a root, so that the verdict draws a token after each.
    nodes = torch.arange(draws, device=device)
    kept = chosen(scores.to(device)).expand(draws, -1)
    tree = nodes * 0 - 2, nodes * 0 - 1, torch.arange(draws + 1, device=device)
    drawn = verify_tree(kept, *tree, 1, torch.rand(draws, device=device), impl="torch").bonus
    counts = drawn.bincount(minlength=30).cpu().double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    mean = draws * expected[possible].double()
    statistic = float(((counts[possible] - mean) ** 2 / mean).sum())
    # Chi-squared: its mean is the number of degrees of freedom, its variance twice that.
    degrees = int(possible.sum()) - 1
    assert (statistic < degrees + 4 * math.sqrt(2 * degrees)) == right
