"""The decoder layers of a model that run as programs.

A third or more of a small step on a CPU is not products but small operations, called one by one. A
program is one call. Those of layers of one kind are shared, so it takes seconds however deep the
model is, and all around the layers (hidden states, virtual tokens, hooks) stays as it is.

Every layer is tried before its program is used, beside its own forward on the same input. One that
cannot be traced, or comes out otherwise, runs as it is, and a line of the log says why. Layers get
their forward for a generation only (`OwnForwards`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from transformers import PreTrainedModel

from hf_spec.execution.attention import PackedStep
from hf_spec.execution.bound_program import BoundProgram
from hf_spec.execution.cpu_linear import has_fast_forward
from hf_spec.execution.layer_programs import (
    MAX_TOKENS,
    LayerCall,
    LayerProgram,
    as_tuple,
    compile_layer,
    kind_of,
    linears_of,
    tensors_of,
)
from hf_spec.execution.own_forwards import OwnForwards
from hf_spec.execution.per_model import made_once
from hf_spec.execution.step_graphs import is_of_transformers

logger = logging.getLogger(__name__)

# By norm, how far a program may be from its layer by rounding.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

MODES = ("auto", "on", "off")
# Calls of layers after which "auto" has programs made: a program saves some 0.2 ms a call, the
# first one takes two seconds, of which the tools that trace are most, and others half a second
# (measured).
WORTH, WORTH_LATER = 10_000, 2_000
# What is left to others at no more tokens than this is left to them at all.
STEP_TOKENS = 64


class _Here(threading.local):
    """What holds for the layers that this thread runs, see the functions of these names."""

    programs_at_once: bool = False
    layers_as_they_are: bool = False


_here = _Here()


@contextmanager
def _holding(name: str) -> Iterator[None]:
    before = getattr(_here, name)
    setattr(_here, name, True)
    try:
        yield
    finally:
        setattr(_here, name, before)


def programs_at_once() -> AbstractContextManager[None]:
    """What this thread runs inside the block is taken to run often: a warm-up before timing."""
    return _holding("programs_at_once")


def layers_as_they_are() -> AbstractContextManager[None]:
    """No layer that this thread runs inside the block runs as a program: hooks act in it."""
    return _holding("layers_as_they_are")


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
_has_traced = threading.Event()
_forwards = OwnForwards()


class CompiledLayers:
    """The programs of one model, kept as long as it lives.

    Attributes:
        mode: whether layers run as programs: "on", "off", or "auto", when they have run often.
        layers: those of attention, known from the first step that was watched.
        programs: by the kind of layer and call; an error where there can be none.
        refused: by name, why layers run as they are.
        seconds: what making and trying programs has taken.
        calls: how often layers ran.
    """

    def __init__(self) -> None:
        self.mode = "auto"
        self.layers: list[CompiledLayer] = []
        self.programs: dict[object, LayerProgram | Exception] = {}
        self.refused: dict[str, str] = {}
        self.seconds = 0.0
        self.calls = 0

    @classmethod
    def of(cls, model: PreTrainedModel) -> CompiledLayers:
        """Those of a model."""
        return made_once(model, "compiled layers", cls)

    @property
    def wanted(self) -> bool:
        """Whether layers run as programs now, as far as they can."""
        worth = WORTH_LATER if _has_traced.is_set() else WORTH
        often = _here.programs_at_once or self.calls >= worth
        return self.mode == "on" or (self.mode == "auto" and often)

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[Watch]:
        """Let layers run as programs inside the block, where and as soon as that is wanted."""
        with ExitStack() as stack:
            watch = Watch(self, model, stack)
            watch.lend()
            yield watch

    def learn(self, model: nn.Module, attending: Mapping[int, nn.Module]) -> None:
        """Find the layers of the attention modules that ran in a step."""
        ran = set(attending.values())
        for name, stack in model.named_modules():
            for index, layer in enumerate(stack if isinstance(stack, nn.ModuleList) else ()):
                mine = [module for module in layer.modules() if module in ran]
                if len(mine) == 1 and mine[0] is not layer:
                    self.layers.append(CompiledLayer(self, f"{name}.{index}", layer, mine[0]))

    def program(
        self, layer: nn.Module, kind: object, weights: Mapping[str, Tensor], call: LayerCall
    ) -> LayerProgram:
        """That of a kind of layers and calls.

        Raises:
            Exception: one of `REASONS`, every time, where there can be none.
        """
        key = kind, call.kind()
        with _lock:
            if key not in self.programs:
                _has_traced.set()
                try:
                    self.programs[key] = compile_layer(layer, weights, call)
                except REASONS as error:
                    self.programs[key] = error
            found = self.programs[key]
        if isinstance(found, Exception):
            raise found
        return found

    def forget_refusals(self) -> None:
        """Let everything be tried again that runs as it is."""
        self.refused.clear()
        for layer in self.layers:
            layer.forget_refusals()

    def refuse(self, name: str, reason: str) -> None:
        """Note why a layer runs as it is; say it once."""
        if reason not in self.refused.values():
            level = logging.WARNING if self.mode == "on" else logging.INFO
            logger.log(level, "%s is not compiled and runs as it is: %s", name, reason)
        self.refused[name] = reason


class Watch:
    """Looks at the steps of a model while they run, and lets its layers become programs."""

    def __init__(self, owner: CompiledLayers, model: nn.Module, stack: ExitStack):
        self._owner = owner
        self._model = model
        self._stack = stack
        self._has_lent = False
        self._on_cpu = next(model.parameters()).device.type == "cpu"

    def ran(self, attending: Mapping[int, nn.Module]) -> None:
        """Learn which attention modules took part in a step."""
        owner = self._owner
        unasked = owner.mode == "off" or (owner.mode == "auto" and not self._on_cpu)
        if self._has_lent or unasked:
            return
        if not owner.layers:
            owner.learn(self._model, attending)
        owner.calls += len(attending)
        self.lend()

    def lend(self) -> None:
        """Let the layers that are known run as programs until the block ends, if it is wanted."""
        owner = self._owner
        if not self._has_lent and owner.layers and owner.wanted:
            known = {one.layer: one for one in owner.layers}
            configs: dict[int, object] = {}

            def make(fresh: list[nn.Module]) -> dict[nn.Module, CompiledLayer]:
                return {layer: known[layer] for layer in fresh if known[layer].begin(configs)}

            for layer in owner.layers:
                self._stack.callback(layer.end)
            self._stack.enter_context(_forwards.lent(known, make))
            self._has_lent = True
            # What has programs once goes on with them.
            owner.calls = max(owner.calls, WORTH)


class CompiledLayer:
    """The forward of a layer that is compiled."""

    def __init__(self, owner: CompiledLayers, name: str, layer: nn.Module, attention: nn.Module):
        self.layer = layer
        self._owner = owner
        self._name = name
        self._attention = attention
        self._kind: object = None
        # By the kind of call, whether its program comes to the same; apart for a single token.
        self._tried: dict[object, bool] = {}
        # Of the block under way: programs by the kind of call, and by what calls look like, None
        # where the layer runs as it is.
        self._programs: dict[object, BoundProgram] = {}
        self._bound: dict[object, BoundProgram | None] = {}

    @property
    def is_compiled(self) -> bool:
        """Whether all calls that it has met run as programs."""
        return bool(self._tried) and all(self._tried.values())

    def forget_refusals(self) -> None:
        """Try the calls again that run as they are."""
        for kind in [kind for kind, same in self._tried.items() if not same]:
            del self._tried[kind]
        self._bound = {}

    def begin(self, configs: dict[int, object]) -> bool:
        """Take the layer as it is now; False if it cannot be compiled. `configs`: see `kind_of`."""
        if (reason := _obstacle(self.layer)) is not None:
            self._owner.refuse(self._name, reason)
            return False
        self._plain = self.layer.forward
        self._weights = tensors_of(self.layer)
        kind = kind_of(self.layer, configs)
        if kind != self._kind:
            self._kind = kind
            self._tried.clear()
        self.end()
        return True

    def end(self) -> None:
        """Forget the weights, which others may want to free; a block under way finds them again."""
        # Other threads may be reading these: they are replaced, never cleared.
        self._programs, self._bound = {}, {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, as a program where there is one."""
        # Accelerate's mixed precision begins inside the model's forward.
        other = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu")
        if other or _here.layers_as_they_are or not isinstance(kwargs.get("spec_step"), PackedStep):
            return self._plain(*args, **kwargs)
        call = LayerCall(args, kwargs)
        looks, bound = call.looks, self._bound
        if looks not in bound:
            if call.num_tokens > MAX_TOKENS:
                return self._plain(*args, **kwargs)
            kind = call.kind(), call.num_tokens == 1
            if kind not in self._tried:
                return self._try(kind, call)
            bound[looks] = self._bind(call) if self._tried[kind] else None
        program = bound[looks]
        result = None if program is None else program(call, kwargs["spec_step"])
        return self._plain(*args, **kwargs) if result is None else result

    def _try(self, kind: object, call: LayerCall) -> Any:
        """Run a call of a new kind as it is, and see whether its program comes to the same."""
        expected = self._plain(*call.args, **call.kwargs)
        start, reason = time.perf_counter(), None
        try:
            step = replace(call.kwargs["spec_step"], written={})
            found = self._bind(call)(call, step)
        # What a layer raises that is traced, and a machine without a compiler, or without a folder
        # for what is compiled.
        except REASONS as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        else:
            if found is None and call.num_tokens > STEP_TOKENS:
                # A prompt may be too long for a program that serves steps.
                return expected
            if found is None:
                reason = "its products or its attention are not those of our kernels"
            elif not _agree(found, expected):
                reason = "its program computes something else"
        if reason is not None:
            self._owner.refuse(self._name, reason)
        self._tried[kind] = reason is None
        self._owner.seconds += time.perf_counter() - start
        return expected

    def _bind(self, call: LayerCall) -> BoundProgram:
        """The program of such calls with the weights of this layer."""
        kind, programs = call.kind(), self._programs
        if kind not in programs:
            program = self._owner.program(self.layer, self._kind, self._weights, call)
            linears = linears_of(self.layer)
            programs[kind] = BoundProgram(program, self._weights, linears, self._attention)
        return programs[kind]


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
