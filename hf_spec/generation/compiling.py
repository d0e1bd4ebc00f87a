"""`hf_spec.compile`: compile the decoder layers of a model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_spec.backend.device.placement import host_default
from hf_spec.common.errors import OptionError, choices
from hf_spec.engine.fast.compiled_layers import CompiledLayers, compiling
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.tree_attention import takes_packed
from hf_spec.engine.models.support_checks import check_model
from hf_spec.engine.runner import ModelRunner

MODES = ("on", "off")
# Nodes of the warm-up steps: a compiled layer is for any number of tokens, or for exactly one.
NODES = (3, 1)


@dataclass(frozen=True)
class CompileReport:
    """Result of `hf_spec.compile`.

    Attributes:
        layers: number of layers that run compiled now.
        programs: number of distinct compiled layers among them.
        seconds: time spent on compiling and trying them in this call.
        refused: why other layers run uncompiled, by name.
    """

    layers: int
    programs: int
    seconds: float
    refused: dict[str, str]


def compile(model: PreTrainedModel, mode: str = "on") -> CompileReport:  # noqa: A001 - as torch's
    """Compile the decoder layers of a model, for all later speculative calls.

    On a CPU each layer becomes C++, built by the machine's compiler, in float32 and bfloat16. On a
    CUDA device PyTorch's Inductor fuses the small operations of a layer between its linear layers
    and its attention, in float32, bfloat16, and float16; it needs Triton. Layers on other devices,
    and layers with 4-bit weights on a GPU, are not compiled.

    Greedy output stays that of plain `generate()` up to ties, since compiled layers add in another
    order. Compiled layers are dropped with the model, and plain `generate()` does not use them.
    Layers that cannot be compiled run as before; the log and `refused` name the reasons.

    Whatever a layer reads in Python is constant in a compiled layer: attributes, configs,
    functions, class attributes, globals of the modeling file. All of it is checked before every
    forward pass of a target and before every draft, and layers are compiled again after a change.
    A layer that reads something whose changes cannot be detected is not compiled. Functions inside
    PyTorch, NumPy and the standard library are not checked.

    Args:
        model: a target or draft model on a CPU or a CUDA device, in evaluation mode.
        mode: "on", or "off" to run its layers uncompiled again.
    """
    if mode not in MODES:
        raise OptionError(f"mode={mode!r}: {choices(mode, MODES)}")
    check_model(model)
    compiled = CompiledLayers.of(model)
    compiled.enabled = mode == "on"
    before = compiled.seconds
    if compiled.enabled:
        compiled.forget_refusals()
        warm_up(model)
    running = [layer for layer in compiled.layers if compiled.enabled and layer.is_compiled]
    programs = sum(not isinstance(program, Exception) for program in compiled.functions.values())
    seconds = compiled.seconds - before
    return CompileReport(len(running), programs, seconds, dict(compiled.refused))


def warm_up(model: PreTrainedModel) -> None:
    """Compile the layers of a model by running a step of every size in `NODES` on a short text.

    Once per model: layers that change later are compiled in the call that meets the change.
    """
    compiled = CompiledLayers.of(model)
    if compiled.is_warm:
        return
    if not takes_packed(model):
        compiled.refuse(type(model).__name__, "it takes no attention function")
        return
    with compiling(True):
        # The first run finds the layers.
        for _ in range(1 if compiled.layers else 2):
            _run(model)
    compiled.is_warm = True


@torch.no_grad()
@host_default()
def _run(model: PreTrainedModel) -> None:
    runner, text = ModelRunner(model, 1), [1, 2, 3, 4]
    with runner.active():
        for count in NODES:
            tree = DraftTree.from_rows([([5] * count, list(range(-1, count - 1)))])
            runner.forward(tree, [text])
            runner.keep([[]])
            text = [*text, 5]
