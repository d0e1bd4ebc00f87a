"""A LoRA that acts on some positions of a forward only.

A forward hook on every chosen linear layer adds x A^T B^T to the rows that were named for this
forward (Hu et al. 2022, arXiv 2106.09685, with its factor inside B). All other rows are not
touched, not even by a sum with zero, so what the model says of them stays bit for bit its own.
Hooks go on layers of any class that keeps rows apart: `nn.Linear`, GPT-2's `Conv1D`, quantised
layers.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_spec.common.errors import AssistantError, UnsupportedError
from hf_spec.engine.models.recurrent_layers import mixers_of

# Down (rank, inputs) and up (outputs, rank) of each layer.
LoraWeights = Mapping[str, tuple[Tensor, Tensor]]
# Rows of a forward, counted over batch and sequence.
Rows = slice | Tensor

# Layers inside these see some tokens only, in an order of their own.
ROUTED = "experts"
SHARED = "shared_expert"


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The linear layers that every token passes one by one, by name; not the head."""
    others = {id(model.get_output_embeddings()), *_in_mixers(model)}
    found: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and id(module) not in others
        and not _is_routed(name)
        # That of Llama 4 is a linear layer, and gives more than its product.
        and not type(module).__name__.endswith("Router")
    }
    if not found:
        raise UnsupportedError(f"{type(model).__name__} has no linear layer that a LoRA could join")
    return found


def new_lora(
    model: PreTrainedModel, rank: int, targets: Iterable[str] = ()
) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Weights in float32 that change nothing yet: A at random, B zero.

    `targets` are last parts of layer names such as "q_proj"; all linear layers by default.
    """
    known, wanted = linear_layers(model), set(targets)
    short = {name: name.rpartition(".")[2] for name in known}
    chosen = [name for name in known if not wanted or short[name] in wanted]
    if not chosen:
        raise AssistantError(
            f"no layer is called {', '.join(sorted(wanted))}; known: {sorted(set(short.values()))}"
        )
    lora = {}
    for name in chosen:
        layer = known[name]
        inputs, outputs = layer_sizes(layer)
        device = next(layer.parameters()).device
        down = nn.Parameter(torch.empty(rank, inputs, device=device))
        nn.init.kaiming_uniform_(down, a=math.sqrt(5))
        lora[name] = down, nn.Parameter(torch.zeros(outputs, rank, device=device))
    return lora


def layer_sizes(layer: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer; the weight of a quantised one has other shapes."""
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    return layer.in_features, layer.out_features


class GatedLora:
    """Hooks for one set of weights, by layer name."""

    def __init__(self, weights: LoraWeights):
        self.weights = weights
        # Per thread: a generation in another one has rows of its own.
        self._here = threading.local()

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model that lacks a layer or has one of another size."""
        layers, by_row = dict(model.named_modules()), _in_mixers(model)
        for name, (down, up) in self.weights.items():
            layer = layers.get(name)
            if not (isinstance(layer, Conv1D) or hasattr(layer, "in_features")):
                raise AssistantError(f"the adapter changes the layer {name}, which the model lacks")
            if id(layer) in by_row:
                raise UnsupportedError(
                    f"{name} belongs to a recurrent layer, which runs tokens in an order of its "
                    "own; train the gated LoRA without it"
                )
            inputs, outputs = layer_sizes(layer)
            rank = down.shape[0] if down.ndim == 2 else 0
            whole = not (down.is_floating_point() and up.is_floating_point())
            if whole or down.shape != (rank, inputs) or up.shape != (outputs, rank):
                raise AssistantError(
                    f"the adapter's LoRA of {name} has the shapes {tuple(down.shape)} and "
                    f"{tuple(up.shape)}, which do not fit {inputs} inputs and {outputs} outputs"
                )

    @contextmanager
    def installed(self, model: PreTrainedModel) -> Iterator[None]:
        """Keep the hooks on the layers of `model`."""
        layers = dict(model.named_modules())
        handles = [
            layers[name].register_forward_hook(self._hook(down, up))
            for name, (down, up) in self.weights.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def acting_on(self, rows: Rows, num_rows: int) -> Iterator[None]:
        """Let the hooks of this thread change `rows`, of `num_rows` that a forward has."""
        self._here.rows = rows, num_rows
        try:
            yield
        finally:
            self._here.rows = None

    def _hook(self, down: Tensor, up: Tensor) -> Any:
        def add(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
            chosen = getattr(self._here, "rows", None)
            if chosen is None:
                return None
            rows, num_rows = chosen
            flat = output.reshape(-1, output.shape[-1])
            if flat.shape[0] != num_rows:
                raise UnsupportedError(
                    f"a layer of class {type(module).__name__} saw {flat.shape[0]} of {num_rows} "
                    "tokens, so a gated LoRA cannot tell which are adaptive; leave the layer out"
                )
            source = inputs[0].reshape(num_rows, -1)[rows].to(down.dtype)
            narrow = nn.functional.linear(source, down)
            if not torch.is_grad_enabled() and output.is_contiguous():
                # The output is the layer's own, and nobody has seen it yet.
                if isinstance(rows, slice) and output.dtype == up.dtype:
                    flat[rows].addmm_(narrow, up.T)
                else:
                    flat[rows] += nn.functional.linear(narrow, up).to(output.dtype)
                return None
            change = nn.functional.linear(narrow, up).to(output.dtype)
            if isinstance(rows, slice):
                rows = torch.arange(num_rows, device=flat.device)[rows]
            return flat.index_add(0, rows, change).view_as(output)

        return add


def merge_lora_inplace(model: PreTrainedModel, weights: LoraWeights) -> None:
    """Add a LoRA to the weights of `model`, for all positions and for good."""
    layers = dict(model.named_modules())
    for name in weights:
        weight: Any = layers[name].weight
        if not weight.is_floating_point():
            raise UnsupportedError(
                f"{name} is quantised: a LoRA cannot be merged into it; merge into the "
                "unquantised model, or train a gated LoRA, which stays apart"
            )
    with torch.no_grad():
        for name, (down, up) in weights.items():
            layer: Any = layers[name]
            change = up.float() @ down.float()
            change = change.T if isinstance(layer, Conv1D) else change
            layer.weight += change.to(layer.weight)


def _in_mixers(model: nn.Module) -> set[int]:
    """Ids of the modules inside recurrent mixers, which see some tokens more than once."""
    return {id(module) for mixer in mixers_of(model) for module in mixer.modules()}


def _is_routed(name: str) -> bool:
    parts = name.split(".")
    return any(ROUTED in part and not part.startswith(SHARED) for part in parts[:-1])
