"""A LoRA that acts at some positions of a forward pass only.

Each chosen linear layer gets a `LowRankChange`, a hook that leaves all other positions
bit-identical. It works on layers of any class that maps tokens independently: `nn.Linear`, GPT-2's
`Conv1D`, quantized layers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from hf_spec.common.errors import AssistantError, UnsupportedError
from hf_spec.engine.forward.low_rank_change import ChosenTokens, LowRankChange
from hf_spec.engine.models.recurrent_layers import mixers_of

# A (rank, inputs) and B (outputs, rank) by layer name.
LoraWeights = Mapping[str, tuple[Tensor, Tensor]]


def linear_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return by name the linear layers that map each token once, without the output head."""
    excluded = {id(model.get_output_embeddings()), *_in_mixers(model)}
    layers: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
        and id(module) not in excluded
        and not _is_routed(name)
        # Llama 4's router is a linear layer that returns a tuple.
        and not type(module).__name__.endswith("Router")
    }
    if not layers:
        raise UnsupportedError(
            f"{type(model).__name__} has no linear layer for a LoRA; use mode 'embeddings'"
        )
    return layers


def new_lora(
    model: PreTrainedModel, rank: int, targets: Iterable[str] = ()
) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """Return initial weights in float32, A random and B zero, so the output is unchanged.

    `targets` are last parts of layer names such as "q_proj"; all linear layers by default.
    """
    layers, suffixes = linear_layers(model), set(targets)
    short = {name: name.rpartition(".")[2] for name in layers}
    chosen = [name for name in layers if not suffixes or short[name] in suffixes]
    if not chosen:
        raise AssistantError(
            f"no layer is called {', '.join(sorted(suffixes))}; choose from "
            f"{sorted(set(short.values()))}"
        )
    lora = {}
    for name in chosen:
        inputs, outputs = layer_sizes(layers[name])
        device = next(layers[name].parameters()).device
        down = nn.Parameter(torch.empty(rank, inputs, device=device))
        nn.init.kaiming_uniform_(down, a=math.sqrt(5))
        lora[name] = down, nn.Parameter(torch.zeros(outputs, rank, device=device))
    return lora


def layer_sizes(layer: Any) -> tuple[int, int]:
    """Return (inputs, outputs) of a linear layer; quantized weights have other shapes."""
    if isinstance(layer, Conv1D):
        return layer.weight.shape[0], layer.weight.shape[1]
    return layer.in_features, layer.out_features


class GatedLora:
    """Hooks for one set of weights, by layer name."""

    def __init__(self, weights: LoraWeights):
        self.weights = weights
        self._tokens = ChosenTokens()

    def check(self, model: PreTrainedModel) -> None:
        """Check that the model has all layers in the right sizes, outside recurrent mixers."""
        layers, in_mixers = dict(model.named_modules()), _in_mixers(model)
        for name, (down, up) in self.weights.items():
            layer = layers.get(name)
            if not (isinstance(layer, Conv1D) or hasattr(layer, "in_features")):
                raise AssistantError(
                    f"the adapter has a LoRA for the layer {name}, which the model lacks"
                )
            if id(layer) in in_mixers:
                raise UnsupportedError(
                    f"{name} belongs to a recurrent layer, which runs tokens in another order; "
                    "train the gated LoRA without it"
                )
            inputs, outputs = layer_sizes(layer)
            rank = down.shape[0] if down.ndim == 2 else 0
            integer = not (down.is_floating_point() and up.is_floating_point())
            if integer or down.shape != (rank, inputs) or up.shape != (outputs, rank):
                raise AssistantError(
                    f"the adapter's LoRA of {name} has the shapes {tuple(down.shape)} and "
                    f"{tuple(up.shape)}, which do not fit {inputs} inputs and {outputs} outputs"
                )

    @contextmanager
    def installed(self, model: PreTrainedModel) -> Iterator[None]:
        """Install the hooks on the layers of `model`; remove them at the end."""
        layers = dict(model.named_modules())
        with ExitStack() as handles:
            for name, (down, up) in self.weights.items():
                hook = LowRankChange(down, up, self._tokens)
                handles.enter_context(layers[name].register_forward_hook(hook))
            yield

    def acting_on(self, gate: Tensor) -> AbstractContextManager[None]:
        """Let this thread's hooks act on the tokens of a forward pass that (T,) `gate` chooses."""
        return self._tokens.chosen(gate)


def merge_lora_inplace(model: PreTrainedModel, weights: LoraWeights) -> None:
    """Add a LoRA to the weights of `model`, for all positions; quantized ones raise an error."""
    layers: dict[str, Any] = dict(model.named_modules())
    for name in weights:
        if not layers[name].weight.is_floating_point():
            raise UnsupportedError(
                f"{name} is quantized: a LoRA cannot be merged into it; merge into the model "
                "before quantization, or train a gated LoRA, which is not merged"
            )
    with torch.no_grad():
        for name, (down, up) in weights.items():
            layer = layers[name]
            change = up.float() @ down.float()
            change = change.T if isinstance(layer, Conv1D) else change
            layer.weight += change.to(layer.weight)


def _in_mixers(model: nn.Module) -> set[int]:
    """Return the ids of the modules in recurrent mixers, which may see tokens more than once."""
    return {id(module) for mixer in mixers_of(model) for module in mixer.modules()}


def _is_routed(name: str) -> bool:
    """Return True for layers of routed experts, which get some tokens only, reordered."""
    outer = name.split(".")[:-1]
    return any("experts" in part and not part.startswith("shared_expert") for part in outer)
