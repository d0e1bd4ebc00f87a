"""`hf_spec.compile`: the decoder layers of a model as programs, before the first call or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from hf_spec.errors import OptionError, choices
from hf_spec.execution.attention import takes_packed
from hf_spec.execution.compiled_layers import MODES, CompiledLayers
from hf_spec.execution.model_checks import check_model
from hf_spec.execution.runner import ModelRunner
from hf_spec.execution.tree import DraftTree

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
    """Make programs of the decoder layers of a model on a CPU, for all speculative calls to come.

    A target or a draft model. A program is C++ of a whole layer, built by the machine's compiler.
    Greedy output stays that of plain `generate()` up to ties: programs add in another order. The
    model itself is left as it is, and programs go with it. Where there is no compiler, or none for
    a layer, it runs as before, and the log and `refused` say why.

    Args:
        model: on a CPU, in evaluation mode.
        mode: "on"; "off" lets the layers run as they are. "auto" is what holds without this
            function: layers become programs when they have run some ten thousand times in all, so
            after a few hundred tokens.

    Raises:
        OptionError: if `mode` is none of these.
        UnsupportedError: if hf_spec cannot run the model at all.
    """
    if mode not in MODES:
        raise OptionError(f"mode={mode!r}: {choices(mode, MODES)}")
    check_model(model)
    compiled = CompiledLayers.of(model)
    compiled.mode = mode
    before = compiled.seconds
    if not takes_packed(model):
        compiled.refuse(type(model).__name__, "it takes no attention function")
    elif mode == "on":
        compiled.forget_refusals()
        # The layers are known once they have run.
        for _ in range(1 if compiled.layers else 2):
            _run(model)
    running = [one for one in compiled.layers if compiled.wanted and one.is_compiled]
    programs = sum(not isinstance(program, Exception) for program in compiled.programs.values())
    seconds = compiled.seconds - before
    return CompileReport(len(running), programs, seconds, dict(compiled.refused))


def compile_once(model: PreTrainedModel, mode: str) -> None:
    """`compile`, unless that has been done."""
    if CompiledLayers.of(model).mode != mode:
        compile(model, mode)


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
