"""Verification on the device: the reference against results by hand, the kernel against both."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hf_spec_kernels import TreeVerdict, launches, verify_tree
from torch import Tensor

VOCAB = 37
# Rows of 5, 0, 1 and 4 nodes; node 0 has two children with the same token, node 8 is virtual.
TOKENS = [3, 10, 10, 11, 12, 20, 30, 31, -2, 32]
PARENT = [-1, 0, 0, 1, 3, -1, -1, 6, 7, 7]
ROW_START = [0, 5, 5, 6, 10]


def tree(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.tensor(n, device=device) for n in (TOKENS, PARENT, ROW_START))  # type: ignore[return-value]


def wishes(tokens: list[int], vocab: int = VOCAB) -> Tensor:
    """Return (N, vocab) random logits whose argmax at every node is the given token."""
    torch.manual_seed(0)
    logits = torch.randn(len(tokens), vocab)
    logits[range(len(tokens)), tokens] = 9.0
    return logits


def verdict(logits: Tensor, impl: str, uniforms: Tensor | None = None) -> TreeVerdict:
    return verify_tree(logits, *tree(logits.device), 5, uniforms, impl=impl)


def as_lists(found: TreeVerdict) -> list[tuple[list[int], int]]:
    rows = zip(found.accepted.tolist(), found.num_accepted.tolist(), strict=True)
    paths = []
    for path, count in rows:
        assert path[count:] == [-1] * (len(path) - count)
        paths.append(path[:count])
    return list(zip(paths, found.bonus.tolist(), strict=True))


# Argmax at every node, and the expected accepted nodes and bonus token of the four rows.
CASES: dict[str, tuple[list[int], list[tuple[list[int], int]]]] = {
    "all accepted": (
        [10, 11, 0, 12, 5, 7, 31, 32, 0, 8],
        [([1, 3, 4], 5), ([], -1), ([], 7), ([7, 9], 8)],
    ),
    "all rejected": (
        [9, 11, 0, 12, 5, 7, 9, 32, 0, 8],
        [([], 9), ([], -1), ([], 7), ([], 9)],
    ),
    "some": (
        [10, 12, 0, 12, 5, 20, 31, 30, 0, 8],
        [([1], 12), ([], -1), ([], 20), ([7], 30)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_reference(name: str) -> None:
    wanted, expected = CASES[name]
    assert as_lists(verdict(wishes(wanted), "torch")) == expected


@pytest.mark.parametrize("name", CASES)
def test_the_kernel(name: str, device: torch.device, dtype: torch.dtype) -> None:
    wanted, expected = CASES[name]
    before = launches["verify_tree"]
    assert as_lists(verdict(wishes(wanted).to(device, dtype), "triton")) == expected
    assert launches["verify_tree"] == before + 1


@pytest.mark.parametrize("vocab", [1, 63, 5000, 9001])
def test_vocabularies_of_several_chunks(vocab: int, device: torch.device) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(10, vocab, device=device)
    found, expected = verdict(logits, "triton"), verdict(logits, "torch")
    assert torch.equal(found.bonus, expected.bonus)
    assert found.bonus[0] == logits[0].argmax()


def odd_logits(kind: str, vocab: int = 9000) -> Tensor:
    """Return logits with ties or special values, within and across chunks of the vocabulary."""
    torch.manual_seed(1)
    logits = torch.randn(10, vocab).clamp(max=3)
    if kind == "ties":
        logits[:, [200, 300, 8200, 8999]] = 5.0
    elif kind == "masked":
        logits[:, :8500] = -math.inf
    elif kind == "all masked":
        logits[:] = -math.inf
    elif kind == "infinite":
        logits[:, [4100, 8000]] = math.inf
    else:
        logits[:, [4200, 4300, 8500]] = math.nan
        logits[:, 7] = math.inf
    return logits


ODD = {"ties": 200, "masked": None, "all masked": 0, "infinite": 4100, "nan": 4200}


@pytest.mark.parametrize("kind", ODD)
def test_the_first_of_equals_is_taken(kind: str, device: torch.device) -> None:
    """Same as `torch.argmax`, where NaN is larger than everything."""
    logits = odd_logits(kind).to(device)
    bonus = verdict(logits, "triton").bonus
    assert bonus[0] == logits[0].argmax()
    if ODD[kind] is not None:
        assert bonus[0] == ODD[kind]
    assert torch.equal(bonus, verdict(logits, "torch").bonus)


def chain_of(count: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return `count` rows with a root alone, whose draws are the bonus tokens."""
    tokens = torch.zeros(count, dtype=torch.long, device=device)
    return tokens, tokens - 1, torch.arange(count + 1, device=device)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_draws_have_the_targets_distribution(impl: str, device: torch.device) -> None:
    """With evenly spaced uniforms, the counts of tokens match their probabilities up to one."""
    count = 100
    torch.manual_seed(0)
    logits = torch.randn(11, device=device) * 2
    logits[4] = -math.inf
    uniforms = (torch.arange(count, device=device) + 0.5) / count
    drawn = verify_tree(
        logits.expand(count, -1).contiguous(), *chain_of(count, device), 1, uniforms, impl=impl
    ).bonus
    counts = drawn.bincount(minlength=11).double()
    expected = logits.double().softmax(dim=0) * count
    assert (counts - expected).abs().max() <= 1
    assert counts[4] == 0
    assert (drawn.diff() >= 0).all()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_draws_from_several_chunks(impl: str, device: torch.device) -> None:
    likely = {100: 0.1, 4500: 0.2, 4600: 0.3, 8990: 0.4}
    logits = torch.full((5, 9001), -20.0, device=device)
    logits[:, [*likely]] = torch.tensor([*likely.values()], device=device).log()
    uniforms = torch.tensor([0.05, 0.15, 0.25, 0.45, 0.9], device=device)
    drawn = verify_tree(logits, *chain_of(5, device), 1, uniforms, impl=impl).bonus
    assert drawn.tolist() == [100, 4500, 4500, 4600, 8990]


# In the interpreter, NumPy also warns about differences of infinities that are not used.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("kind", ["masked", "all masked", "infinite", "nan"])
def test_draws_from_odd_logits(kind: str, device: torch.device) -> None:
    logits = odd_logits(kind).to(device)
    # Include the ends of [0, 1): tokens with probability 0 are never drawn.
    uniforms = torch.tensor([0.0, 0.3, 0.5, 0.7, 0.9, 1 - 2**-24] * 2, device=device)[:10]
    drawn = verify_tree(logits, *chain_of(10, logits.device), 1, uniforms, impl="triton").bonus
    expected = verify_tree(logits, *chain_of(10, logits.device), 1, uniforms, impl="torch").bonus
    if kind != "masked":
        # Plain generate() raises an error where the softmax is NaN.
        assert drawn.tolist() == expected.tolist() == [-1] * 10
        return
    chosen = logits[range(10), drawn]
    assert (chosen > -math.inf).all()
    # Rounding may move a draw to a neighboring possible token.
    possible = (logits[0] > -math.inf).cumsum(dim=0)
    assert (possible[drawn] - possible[expected]).abs().max() <= 1


def test_a_draw_walks_too(device: torch.device) -> None:
    logits = wishes(CASES["all accepted"][0]).to(device) * 10
    uniforms = torch.full((10,), 0.5, device=device)
    for impl in ("triton", "torch"):
        assert as_lists(verdict(logits, impl, uniforms)) == CASES["all accepted"][1]


def sampled_tree(
    rows: int, vocab: int, children: int, device: torch.device
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor], Tensor, Tensor]:
    """Return target logits, trees (root, siblings, grandchild), draft probabilities, uniforms."""
    nodes = children + 2
    logits = torch.randn(rows * nodes, vocab) * 2
    draft = (logits + torch.randn(rows * nodes, vocab)).softmax(dim=-1)
    # Exclude tokens from one or both distributions.
    logits[:, 1::7], draft[:, 2::5] = -math.inf, 0.0
    draft /= draft.sum(dim=-1, keepdim=True)
    drawn = draft[::nodes].multinomial(children)
    grandchild = draft[1::nodes].multinomial(1)
    root = torch.zeros(rows, 1, dtype=torch.long)
    tokens = torch.cat([root, drawn, grandchild], dim=1).flatten()
    start = torch.arange(rows)[:, None] * nodes
    parents = torch.cat([root - 1, start.expand(-1, children), start + 1], dim=1).flatten()
    row_start = torch.arange(rows + 1) * nodes
    tree = tokens.to(device), parents.to(device), row_start.to(device)
    uniforms = torch.rand(rows * nodes, 2, device=device)
    return logits.to(device), tree, draft.to(device), uniforms


@pytest.mark.by_default(vocab=lambda vocab: vocab == 4099, dtype=lambda dtype: dtype.itemsize == 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", [37, 4099])
def test_residual_rejection(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(vocab)
    logits, tree, draft, uniforms = sampled_tree(15, vocab, 4, device)
    logits = logits.to(dtype)
    verdicts = [
        verify_tree(logits, *tree, 6, uniforms, draft, impl=impl) for impl in ("triton", "torch")
    ]
    # float32 and float64 sums differ by rounding, which may move a draw to the next token.
    same = (verdicts[0].packed == verdicts[1].packed).all(dim=1)
    assert same.float().mean() >= 0.9
    assert torch.equal(verdicts[0].num_accepted, verdicts[1].num_accepted)
    assert {0, 1, 2} <= set(verdicts[0].num_accepted.tolist())


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize(("uniform", "accepted"), [(0.2, [3]), (0.5, [])])
def test_the_third_sibling(
    uniform: float, accepted: list[int], impl: str, device: torch.device
) -> None:
    """Check by hand: p = (0, 0, 4/21, 17/21) and q = (0, 0, 2/3, 1/3) after two rejections.

    The third sibling is accepted for uniforms below 2/7. If q still had the rejected tokens, the
    limit would be 2/3.
    """
    logits = torch.tensor([0.0, 0.0, 0.5, 0.5], device=device).log().expand(4, -1).contiguous()
    draft = torch.tensor([0.4, 0.3, 0.2, 0.1], device=device).expand(4, -1).contiguous()
    tokens = torch.tensor([0, 0, 1, 2], device=device)
    parents = torch.tensor([-1, 0, 0, 0], device=device)
    row_start = torch.tensor([0, 4], device=device)
    uniforms = torch.tensor([0.9, uniform], device=device).expand(4, -1).contiguous()
    found = verify_tree(logits, tokens, parents, row_start, 4, uniforms, draft, impl=impl)
    assert as_lists(found) == [(accepted, 3)]


# In the interpreter, NumPy warns about the NaN that the kernel looks for.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_residual_rejection_where_the_target_is_undefined(device: torch.device) -> None:
    logits, tree, draft, uniforms = sampled_tree(3, 40, 2, device)
    logits[0, 3], logits[4, 5], logits[8] = math.nan, math.inf, -math.inf
    for impl in ("triton", "torch"):
        found = verify_tree(logits, *tree, 4, uniforms, draft, impl=impl)
        assert as_lists(found) == [([], -1)] * 3


def test_a_draft_that_equals_the_target_is_accepted(device: torch.device) -> None:
    logits, tree, _, uniforms = sampled_tree(20, 40, 2, device)
    tree[0][3::4], tree[1][3::4] = -2, tree[1][1::4]
    draft = logits.softmax(dim=-1)
    tree[0][1::4] = draft[::4].multinomial(1)[:, 0]
    found = verify_tree(logits, *tree, 4, uniforms * 0.99, draft, impl="triton")
    assert found.num_accepted.tolist() == [1] * 20


@pytest.mark.parametrize("right", [True, False])
def test_residual_rejection_keeps_the_distribution(right: bool) -> None:
    """Tests the reference; the distribution is wrong if drafts were not drawn from q."""
    torch.manual_seed(1)
    rows, vocab, children = 2000, 9, 2
    nodes = children + 2
    logits, tree, draft, uniforms = sampled_tree(rows, vocab, children, torch.device("cpu"))
    logits[:], draft[:] = logits[0].clone(), draft[0].clone()
    tree[0].view(rows, nodes)[:, 1:-1] = draft[::nodes].multinomial(children)
    draft = draft if right else torch.full_like(draft, 1 / vocab)
    found = verify_tree(logits, *tree, nodes, uniforms, draft, impl="torch")
    accepted = tree[0][found.accepted[:, 0].clamp(min=0)]
    first = torch.where(found.num_accepted > 0, accepted, found.bonus)
    counts = first.bincount(minlength=vocab).double()
    mean = rows * logits[0].double().softmax(dim=-1)
    possible = mean > 0
    assert counts[~possible].sum() == 0
    statistic = float(((counts - mean)[possible] ** 2 / mean[possible]).sum())
    degrees = int(possible.sum()) - 1
    assert (statistic < degrees + 4 * (2 * degrees) ** 0.5) == right


def test_strides_are_free(device: torch.device) -> None:
    wide = torch.zeros(10, 2 * VOCAB, device=device)
    logits = wide[:, VOCAB:]
    logits.copy_(wishes(CASES["some"][0]))
    wide[:, :VOCAB] = 99.0
    assert as_lists(verdict(logits, "triton")) == CASES["some"][1]


def test_no_rows_and_roots_alone(device: torch.device) -> None:
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    start = torch.zeros(1, dtype=torch.long, device=device)
    found = verify_tree(torch.zeros(0, 5, device=device), nothing, nothing, start, 0, impl="triton")
    assert found.accepted.shape == (0, 0)
    finished = torch.zeros(3, dtype=torch.long, device=device)
    found = verify_tree(
        torch.zeros(0, 5, device=device), nothing, nothing, finished, 0, impl="triton"
    )
    assert found.bonus.tolist() == [-1, -1]


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"logits": torch.zeros(10, 3).long()}, TypeError, "logits is torch.int64"),
        ({"logits": torch.zeros(3, 10).T}, ValueError, "logits has strides"),
        ({"logits": torch.zeros(10, 0)}, ValueError, "no tree"),
        ({"parent": torch.zeros(9).long()}, ValueError, "parent has shape"),
        ({"token_ids": torch.zeros(10).int()}, TypeError, "token_ids is torch.int32"),
        ({"uniforms": torch.zeros(9)}, ValueError, "uniforms has shape"),
        (
            {"uniforms": torch.zeros(10), "draft_probs": torch.zeros(10, 5)},
            ValueError,
            "uniforms has shape",
        ),
        (
            {"uniforms": torch.zeros(10, 2), "draft_probs": torch.zeros(10, 4)},
            ValueError,
            "draft_probs has shape",
        ),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(
    change: dict[str, Any], error: type[Exception], match: str, device: torch.device
) -> None:
    names = ("token_ids", "parent", "row_start")
    arguments = {"logits": torch.zeros(10, 5), **dict(zip(names, tree(), strict=True)), **change}
    moved = {
        name: value if "strides" in match and name == "logits" else value.to(device)
        for name, value in arguments.items()
    }
    if "strides" in match:
        moved["logits"] = moved["logits"].T.to(device).T
    with pytest.raises(error, match=match):
        verify_tree(**moved, max_nodes=5, impl="triton")
