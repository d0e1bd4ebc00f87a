"""The decoder layers of a model that run as compiled programs.

A third or more of a small step on a CPU is not products but small operations, called one by one.
Layers are compiled, not the model: those of one kind share a program, so it takes seconds however
deep the model is, and all around the layers (hidden states, virtual tokens, hooks) stays as it is.
A kind has two programs, one for a single token and one for any larger number of them.

Every layer is tried before its program is used, beside its own forward on the same input. One that
cannot be traced, or comes out otherwise, runs as it is, and a line of the log says why. Layers get
their forward for a generation only (`OwnForwards`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from transformers import PreTrainedModel

from hf_spec.execution.attention import PackedStep
from hf_spec.execution.cpu_linear import has_fast_forward
from hf_spec.execution.layer_programs import (
    MAX_TOKENS,
    LayerCall,
    Program,
    as_tuple,
    compile_layer,
    kind_of,
    linears_of,
    outside,
    tensors_of,
)
from hf_spec.execution.own_forwards import OwnForwards
from hf_spec.execution.per_model import made_once
from hf_spec.execution.step_graphs import is_of_transformers

logger = logging.getLogger(__name__)

# By norm, how far a program may be from its layer by rounding.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}

# What may be raised where a layer cannot be traced or compiled.
REASONS = (
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)

_lock = threading.RLock()
_forwards = OwnForwards()


class CompiledLayers:
    """The programs of one model, kept as long as it lives.

    Attributes:
        wanted: whether layers run as programs.
        layers: those of attention, known from the first step that was watched.
        programs: by the kind of layer and call; a reason where there can be none.
        refused: by name, why layers run as they are.
        seconds: what compiling and trying has taken.
    """

    def __init__(self) -> None:
        self.wanted = False
        self.layers: list[CompiledLayer] = []
        self.programs: dict[object, Program | str] = {}
        self.refused: dict[str, str] = {}
        self.seconds = 0.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> CompiledLayers:
        """Those of a model."""
        return made_once(model, "compiled layers", cls)

    def active(self) -> AbstractContextManager[None]:
        """Let known layers run as programs inside the block, if that is wanted."""
        known = {one.layer: one for one in self.layers} if self.wanted else {}
        return _forwards.lent(
            known, lambda fresh: {layer: known[layer] for layer in fresh if known[layer].begin()}
        )

    def learn(self, model: PreTrainedModel, attending: Mapping[int, nn.Module]) -> None:
        """Find the layers of the attention modules that ran in a step; later blocks have them."""
        if self.layers or not self.wanted:
            return
        ran = set(attending.values())
        for name, stack in model.named_modules():
            for index, layer in enumerate(stack if isinstance(stack, nn.ModuleList) else ()):
                mine = [module for module in layer.modules() if module in ran]
                if len(mine) == 1 and mine[0] is not layer:
                    self.layers.append(CompiledLayer(self, f"{name}.{index}", layer, mine[0]))

    def forget_refusals(self) -> None:
        """Let everything be tried again that runs as it is."""
        self.refused.clear()
        for layer in self.layers:
            layer.forget_refusals()

    def refuse(self, name: str, reason: str) -> None:
        """Note why a layer runs as it is; say it once."""
        if reason not in self.refused.values():
            logger.warning("%s is not compiled and runs as it is: %s", name, reason)
        self.refused[name] = reason


class CompiledLayer:
    """The forward of a layer that is compiled."""

    def __init__(self, owner: CompiledLayers, name: str, layer: nn.Module, attention: nn.Module):
        self.layer = layer
        self._owner = owner
        self._name = name
        self._attention = attention
        self._kind: object = None
        # None where the layer runs as it is: by the kind of call, and by what calls look like.
        self._tried: dict[object, Program | None] = {}
        self._programs: dict[object, Program | None] = {}

    @property
    def is_compiled(self) -> bool:
        """Whether all calls that it has met run as programs."""
        return bool(self._tried) and None not in self._tried.values()

    def forget_refusals(self) -> None:
        """Try the calls again that run as they are."""
        for known in (self._tried, self._programs):
            for refused in [call for call, program in known.items() if program is None]:
                del known[refused]

    def begin(self) -> bool:
        """Take the layer as it is now; False if it cannot be compiled."""
        if (reason := _obstacle(self.layer)) is not None:
            self._owner.refuse(self._name, reason)
            return False
        self._plain = self.layer.forward
        self._weights = tensors_of(self.layer)
        self._products = {id(one.weight): one for one in linears_of(self.layer).values()}
        kind = kind_of(self.layer)
        if kind != self._kind:
            self._kind = kind
            self._tried.clear()
            self._programs.clear()
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, as a program where there is one."""
        # Accelerate's mixed precision begins inside the model's forward.
        other = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        if other or not isinstance(kwargs.get("spec_step"), PackedStep):
            return self._plain(*args, **kwargs)
        call = LayerCall(args, kwargs)
        looks = call.looks
        if looks not in self._programs:
            if call.num_tokens > MAX_TOKENS:
                return self._plain(*args, **kwargs)
            kind = call.kind()
            if kind not in self._tried:
                return self._try(kind, call)
            self._programs[looks] = self._tried[kind]
        program = self._programs[looks]
        if program is None:
            return self._plain(*args, **kwargs)
        return self._run(program, call, kwargs["spec_step"])

    def _run(self, program: Program, call: LayerCall, step: PackedStep) -> Any:
        with outside(step, self._attention, self._products):
            return program([*self._weights.values(), *call.tensors])

    def _try(self, kind: object, call: LayerCall) -> Any:
        """Run a call of a new kind as it is, and see whether its program comes to the same."""
        expected = self._plain(*call.args, **call.kwargs)
        start = time.perf_counter()
        program = self._program(kind, call)
        if callable(program):
            found = self._run(program, call, replace(call.kwargs["spec_step"], written={}))
            program = program if _agree(found, expected) else "its program computes something else"
        if isinstance(program, str):
            self._owner.refuse(self._name, program)
        self._tried[kind] = program if callable(program) else None
        self._owner.seconds += time.perf_counter() - start
        return expected

    def _program(self, kind: object, call: LayerCall) -> Program | str:
        if kind is None:
            return "it is handed objects of its own"
        known, key = self._owner.programs, (self._kind, kind)
        with _lock:
            if key not in known:
                try:
                    known[key] = compile_layer(self.layer, self._weights, call)
                # What a layer raises that is traced, and a machine without a compiler, or without a
                # folder for what is compiled.
                except REASONS as error:
                    said = str(error).strip().partition("\n")[0]
                    known[key] = said or type(error).__name__
        return known[key]


def _obstacle(layer: nn.Module) -> str | None:
    """Why a layer cannot be compiled, or None; trying may still show a reason."""
    if layer.training:
        return "it is in training mode"
    if (reason := _weights_obstacle(tensors_of(layer).values())) is not None:
        return reason
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return "there are hooks of all modules"
    for module in layer.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # Those of transformers collect what drafts do not ask for; the layer's own stay around it.
        seen = module is layer or all(map(is_of_transformers, hooks))
        # Products on the CPU get forwards that an operation of the program calls.
        own = "forward" in module.__dict__ and not has_fast_forward(module)
        if own or not seen or hasattr(module, "_hf_hook"):
            return "it has hooks or a forward of its own"
    return None


def _weights_obstacle(tensors: Collection[Tensor]) -> str | None:
    if {tensor.device.type for tensor in tensors} != {"cpu"}:
        return "it is not on a CPU"
    if {type(tensor) for tensor in tensors} - {Tensor, nn.Parameter}:
        return "its weights are of a class of their own"
    kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if odd := sorted(_name(kind) for kind in kinds - TOLERANCE.keys()):
        return f"it has weights in {odd[0]}; {', '.join(map(_name, TOLERANCE))} are compiled"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _agree(found: Any, expected: Any) -> bool:
    """Whether results are equal up to rounding; nothing but zeros would prove nothing."""
    for one, other in zip(as_tuple(found), as_tuple(expected), strict=True):
        if isinstance(other, Tensor):
            limit = TOLERANCE.get(other.dtype, 0.0) * other.norm()
            if one.shape != other.shape or not (one - other).norm() < limit:
                return False
    return True
