"""Compiled layers compute the same as their PyTorch layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_spec.backend.cpu.layer_text import SourceError
from hf_spec.engine.fast.layer_call import BoundLayer
from hf_spec.engine.fast.layer_tracing import DOWN, UP, LayerCall, compile_layer, tensors_of
from tests.compiler import needs_compiler

pytestmark = needs_compiler

WIDTH = 12
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


class Layer(nn.Module):
    """Layer that applies `compute` to its states, (1, T, 12); has a weight and linear layers."""

    def __init__(self, compute: Callable[[Any, Tensor], Any]):
        super().__init__()
        self.compute = compute
        self.weight = nn.Parameter(torch.randn(WIDTH))
        self.linear = nn.Linear(WIDTH, 18)
        self.back = nn.Linear(18, WIDTH, bias=False)

    def forward(self, states: Tensor) -> Any:
        return self.compute(self, states)


def rotated(layer: Layer, x: Tensor) -> Tensor:
    heads = x.view(1, x.shape[1], -1, 4).transpose(1, 2)
    left, right = heads.chunk(2, dim=-1)
    turned = torch.cat([-right, left], dim=-1)
    return (heads + 0.5 * turned).transpose(1, 2).reshape(1, x.shape[1], -1)


def interleaved(layer: Layer, x: Tensor) -> Tensor:
    pairs = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1)
    return x * layer.weight + pairs.flatten(-2)


def root_mean_square(layer: Layer, x: Tensor) -> Tensor:
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return layer.weight * scaled.to(x.dtype)


def partly(layer: Layer, x: Tensor) -> Tensor:
    """Concatenate slices, one of which is empty."""
    first, rest, none = x[..., :8], x[..., 8:], x[..., 12:]
    return torch.cat([first * 2, none, rest], dim=-1)


def gated(layer: Layer, x: Tensor) -> Tensor:
    up, gate, rest = layer.linear(x).split([6, 6, 6], dim=-1)
    return layer.back(torch.cat([F.silu(gate) * up, rest, up.tanh()], dim=-1)) + x


def by_head(layer: Layer, x: Tensor) -> Tensor:
    """Compute with means over one axis, with axes in a different order than in memory."""
    heads = x.view(1, x.shape[1], 3, 4).transpose(1, 2)
    return (heads - heads.mean(-1, keepdim=True)).permute(0, 2, 3, 1).reshape(1, -1, WIDTH)


COMPUTED: dict[str, Callable[[Any, Tensor], Any]] = {
    "sum": lambda layer, x: x + 2 * x - (1 - x) / 3,
    "scaled sum": lambda layer, x: torch.add(x, layer.weight, alpha=3),
    "powers": lambda layer, x: x**2 + x**3,
    "exponential": lambda layer, x: torch.exp(x) + torch.exp(-x),
    "large": lambda layer, x: torch.sigmoid(50 * x) + torch.tanh(50 * x) + F.silu(-90 * x),
    "gelu": lambda layer, x: F.gelu(x),
    "gelu by tanh": lambda layer, x: F.gelu(x, approximate="tanh"),
    "relu": lambda layer, x: F.relu(x) * layer.weight,
    "layer norm": lambda layer, x: F.layer_norm(x, (WIDTH,), layer.weight, layer.weight, 1e-5),
    "plain layer norm": lambda layer, x: F.layer_norm(x, (WIDTH,)),
    "mean": lambda layer, x: x - x.mean(-1)[..., None],
    "total": lambda layer, x: x * x.sum(-1, keepdim=True),
    "product": lambda layer, x: layer.linear(x),
    "product of a part": lambda layer, x: layer.back(layer.linear(x[..., :12]))[..., 3:],
    "weights alone": lambda layer, x: x * (1 + layer.weight.float()).to(x.dtype),
    "a sum of weights": lambda layer, x: x * layer.weight.mean(-1, keepdim=True),
    "rotated": rotated,
    "interleaved": interleaved,
    "root mean square": root_mean_square,
    "partly": partly,
    "gated": gated,
    "by head": by_head,
}


def program_of(layer: nn.Module, *given: Any) -> Callable[..., Any]:
    weights = tensors_of(layer)
    program = compile_layer(layer, weights, LayerCall(given, {}))
    bound = BoundLayer(program, weights, layer, layer)
    step: Any = None
    return lambda *args: bound(LayerCall(args, {}), step)


@pytest.mark.by_default(dtype=lambda dtype: dtype == torch.bfloat16)
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", COMPUTED)
def test_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = Layer(COMPUTED[name]).to(dtype)
    run = program_of(layer, torch.randn(1, 2, WIDTH, dtype=dtype))
    for tokens in (1, 2, 5, 11):
        states = torch.randn(1, tokens, WIDTH, dtype=dtype)
        found, expected = run(states), layer(states)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@torch.no_grad()
@pytest.mark.parametrize("name", ["sum", "interleaved"])
def test_bfloat16_is_rounded_after_every_operation(name: str) -> None:
    """Results have the bits of PyTorch; without rounding between operations, they differ."""
    torch.manual_seed(0)
    layer = Layer(COMPUTED[name]).to(torch.bfloat16)
    run = program_of(layer, torch.randn(1, 2, WIDTH, dtype=torch.bfloat16))
    states = torch.randn(1, 500, WIDTH, dtype=torch.bfloat16)
    expected = layer(states)
    assert torch.equal(run(states), expected)
    kept = layer.float()(states.float()).bfloat16()
    assert (kept != expected).float().mean() > 0.05


@torch.no_grad()
@pytest.mark.parametrize("name", ["gated", "root mean square", "layer norm"])
def test_a_token_has_the_same_bits_in_every_batch(name: str) -> None:
    layer = Layer(COMPUTED[name])
    run = program_of(layer, torch.randn(1, 1, WIDTH))
    states = torch.randn(1, 20, WIDTH)
    together = run(states)
    for token in range(20):
        assert torch.equal(run(states[:, token : token + 1])[0, 0], together[0, token])


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rank", "outputs"), [(1, 70), (5, 24), (16, 128)])
def test_low_rank_changes_of_chosen_tokens(rank: int, outputs: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(WIDTH, outputs)).to(dtype)
    down, up = torch.randn(rank, WIDTH, dtype=dtype), torch.randn(rank, outputs, dtype=dtype)
    weights = {**tensors_of(layer), "0.weight" + DOWN: down, "0.weight" + UP: up}
    first = LayerCall((torch.randn(1, 2, WIDTH, dtype=dtype),), {}, torch.tensor([True, False]))
    bound = BoundLayer(compile_layer(layer, weights, first), weights, layer, layer)
    step: Any = None
    before = torch.get_num_threads()
    for tokens, threads in ((1, 1), (2, 3), (9, 3)):
        states = torch.randn(1, tokens, WIDTH, dtype=dtype)
        torch.set_num_threads(threads)
        try:
            for gate in (torch.rand(tokens) < 0.5, torch.ones(tokens) > 0, torch.zeros(tokens) > 0):
                found = bound(LayerCall((states,), {}, gate), step)
                plain = bound(LayerCall((states,), {}, torch.zeros(tokens) > 0), step)
                expected = plain.float() + states.float() @ down.float().T @ up.float()
                assert torch.equal(found[0, ~gate], plain[0, ~gate])
                limits = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
                torch.testing.assert_close(found[0, gate].float(), expected[0, gate], **limits)
        finally:
            torch.set_num_threads(before)


@torch.no_grad()
def test_several_results_and_none() -> None:
    layer = Layer(lambda layer, x: (x + 1, None, layer.linear(x)))
    states = torch.randn(1, 3, WIDTH)
    first, nothing, last = program_of(layer, states)(states)
    assert torch.equal(first, states + 1)
    assert nothing is None
    torch.testing.assert_close(last, layer.linear(states))


@torch.no_grad()
def test_what_is_not_a_number_stays_so_in_its_token() -> None:
    """The results of other tokens are finite."""
    layer = Layer(COMPUTED["gated"])
    states = torch.randn(1, 4, WIDTH)
    run = program_of(layer, states)
    states[0, 2] = torch.nan
    found = run(states)
    assert found[0, 2].isnan().all()
    assert not found[0, [0, 1, 3]].isnan().any()


@torch.no_grad()
def test_threads_share_the_tokens() -> None:
    layer = Layer(COMPUTED["gated"])
    states = torch.randn(1, 40, WIDTH)
    run, before = program_of(layer, states), torch.get_num_threads()
    alone = run(states)
    try:
        torch.set_num_threads(3)
        assert torch.equal(run(states), alone)
    finally:
        torch.set_num_threads(before)


def over_tokens(layer: Layer, x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def longer(layer: Layer, x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=1)


def mixed(layer: Layer, x: Tensor) -> Tensor:
    return x.reshape(1, -1)


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (over_tokens, "sums over tokens"),
        (longer, "adds tokens"),
        (mixed, "mixes tokens"),
        (lambda layer, x: x.cumsum(-1), r"no C\+\+ for aten.cumsum"),
        (lambda layer, x: x**0.7, r"no C\+\+ for aten.pow"),
        (lambda layer, x: x.double().float(), r"no C\+\+ for aten._to_copy"),
        (lambda layer, x: x * float("inf"), r"no C\+\+ for inf"),
        (lambda layer, x: layer.weight, "something else than states of tokens"),
        (lambda layer, x: F.linear(x, 2 * layer.weight[None]), "else than states with weights"),
    ],
)
def test_what_there_is_no_program_for(compute: Any, reason: str) -> None:
    layer = Layer(compute)
    with pytest.raises(SourceError, match=reason):
        program_of(layer, torch.randn(1, 3, WIDTH))
