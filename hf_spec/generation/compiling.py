"""`hf_spec.compile`: the decoder layers of a model as programs, before the first call or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_spec.errors import OptionError, choices
from hf_spec.execution.attention import takes_packed
from hf_spec.execution.compiled_layers import CompiledLayers
from hf_spec.execution.model_checks import check_model
from hf_spec.execution.runner import ModelRunner
from hf_spec.execution.tree import DraftTree

MODES = ("on", "off")
# Nodes of the steps that are run: a program for any number, and one for a single token.
NODES = (3, 1)


@dataclass(frozen=True)
class CompileReport:
    """What `hf_spec.compile` did.

    Attributes:
        layers: how many layers run as programs now.
        programs: how many programs they share.
        seconds: what compiling and trying them took in this call.
        refused: why other layers run as they are, by name.
    """

    layers: int
    programs: int
    seconds: float
    refused: dict[str, str]


def compile(model: PreTrainedModel, mode: str = "on") -> CompileReport:  # noqa: A001 - as torch's
    """Compile the decoder layers of a model on a CPU, for all speculative calls that follow.

    A target or a draft model. Greedy output stays that of plain `generate()` up to ties: programs
    add in another order. The model itself is left as it is, and what was compiled goes with it.
    Where there is no compiler, or a layer cannot be compiled, it runs as before, and the log and
    `refused` say why.

    Args:
        model: on a CPU, in evaluation mode.
        mode: "on"; "off" lets the layers run as they are again.

    Raises:
        OptionError: if `mode` is neither.
        UnsupportedError: if hf_spec cannot run the model at all.
    """
    if mode not in MODES:
        raise OptionError(f"mode={mode!r}: {choices(mode, MODES)}")
    check_model(model)
    compiled = CompiledLayers.of(model)
    compiled.wanted = mode == "on"
    before = compiled.seconds
    if not takes_packed(model):
        compiled.refuse(type(model).__name__, "it takes no attention function")
    elif compiled.wanted:
        compiled.forget_refusals()
        # The layers are known once they have run.
        for _ in range(1 if compiled.layers else 2):
            _run(model)
    running = [one for one in compiled.layers if compiled.wanted and one.is_compiled]
    programs = sum(not isinstance(program, str) for program in compiled.programs.values())
    seconds = compiled.seconds - before
    return CompileReport(len(running), programs, seconds, dict(compiled.refused))


def compile_once(model: PreTrainedModel) -> None:
    """`compile`, unless that has been done."""
    if not CompiledLayers.of(model).wanted:
        compile(model)


@torch.no_grad()
def _run(model: PreTrainedModel) -> None:
    """Run a step of every form on a short text."""
    runner, text = ModelRunner(model, 1), [1, 2, 3, 4]
    with runner.active():
        for count in NODES:
            tree = DraftTree.from_rows([([5] * count, list(range(-1, count - 1)))])
            runner.forward(tree, [text])
            runner.keep([[]])
            text = [*text, 5]
