"""Compiled decoder layers of one model: traced, written in C++, and one call each.

A third or more of a small step on a CPU is not matmuls but small operations, called one by one. A
compiled layer is one call. Layers of one kind share a program, so compiling takes seconds however
deep the model is, and all around the layers (hidden states, virtual tokens, hooks) stays as it is.

Compiling is opt-in: `hf_spec.compile(model)`, or `compile=True` of a
strategy. Every program is tried beside the layer's own forward on the same input. A layer that
cannot be traced, that reads what cannot be watched (`layer_state`), or whose program computes
something else runs uncompiled, and the log names the reason. What the layers read is compared with
what they were traced with before every forward pass. Layers have compiled forwards during a
generation only (`ForwardOverrides`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module
from transformers import PreTrainedModel

from hf_spec.engine.fast.forward_overrides import ForwardOverrides
from hf_spec.engine.fast.layer_call import BoundProgram
from hf_spec.engine.fast.layer_state import LayerState, UnwatchableError
from hf_spec.engine.fast.layer_tracing import (
    MAX_TOKENS,
    LayerCall,
    LayerProgram,
    as_tuple,
    compile_layer,
    linears_of,
    tensors_of,
)
from hf_spec.engine.fast.packed_linear import has_fast_forward, packed_changes
from hf_spec.engine.forward.model_cache import cached_per_model
from hf_spec.engine.forward.tree_attention import PackedStep

logger = logging.getLogger(__name__)

# Relative distance by norm at which a program still equals its layer up to rounding.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
# Programs of one model. Layers whose state changes from call to call would need more and more.
MAX_PROGRAMS = 16
# A call of at most this many tokens that no program serves is not tried again.
STEP_TOKENS = 64


class _Here(threading.local):
    """Settings of the calls that this thread runs.

    Attributes:
        compile: overrides `CompiledLayers.enabled` of every model; None leaves it.
        compiled: whether the forward pass under way runs layers compiled.
        uncompiled: True while layers must run uncompiled because Python acts inside them.
    """

    compile: bool | None = None
    compiled: bool = False
    uncompiled: bool = False


_here = _Here()


@contextmanager
def _set(name: str, value: bool | None) -> Iterator[None]:
    before = getattr(_here, name)
    setattr(_here, name, value)
    try:
        yield
    finally:
        setattr(_here, name, before)


def compiling(wanted: bool | None) -> AbstractContextManager[None]:
    """Compile the layers of every model that this thread runs inside the block, or do not.

    With None, `hf_spec.compile` of each model decides.
    """
    return _set("compile", wanted)


def uncompiled() -> AbstractContextManager[None]:
    """Run layers uncompiled in this thread: hooks act inside them."""
    return _set("uncompiled", True)


# Errors of a layer that cannot be traced or compiled.
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
_forwards = ForwardOverrides()


class CompiledLayers:
    """The compiled layers of one model, cached as long as it lives.

    Attributes:
        enabled: whether `hf_spec.compile` was called for the model.
        layers: its decoder layers, known from the first step that ran.
        programs: by the kind of layer and call; an error where there can be none.
        refused: why layers run uncompiled, by name.
        seconds: time spent on compiling and trying programs.
        code: key of the code that the layers run, see `LayerState.seal`.
    """

    def __init__(self) -> None:
        self.enabled = False
        self.layers: list[CompiledLayer] = []
        self.programs: dict[object, LayerProgram | Exception] = {}
        self.refused: dict[str, str] = {}
        self.seconds = 0.0
        self.code: Hashable = None
        self._state: LayerState | None = None
        self._sessions = 0
        self._packed = 0

    @classmethod
    def of(cls, model: PreTrainedModel) -> CompiledLayers:
        """Return those of a model."""
        return cached_per_model(model, "compiled layers", cls)

    @property
    def wanted(self) -> bool:
        """True if this thread runs the layers compiled, as far as they can be."""
        return self.enabled if _here.compile is None else _here.compile

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[LayerSession]:
        """Let layers run compiled inside the block, as soon as they are known and if wanted."""
        with ExitStack() as stack:
            session = LayerSession(self, model, stack)
            session.install()
            yield session

    def join(self) -> None:
        """Count one more session."""
        with _lock:
            self._sessions += 1

    def leave(self) -> None:
        """Count one session less; the last one frees what refers to weights."""
        with _lock:
            self._sessions -= 1
            if not self._sessions:
                self._state = None
                for layer in self.layers:
                    layer.end()

    def refresh(self) -> None:
        """Take the layers as they are now, unless they are as they were."""
        with _lock:
            packed = packed_changes()
            if packed != self._packed or self._state is None or not self._state.holds():
                self._packed, state, reason = packed, LayerState(), None
                for layer in self.layers:
                    layer.begin(state)
                try:
                    self.code = state.seal()
                except UnwatchableError as error:
                    reason = str(error)
                for layer in self.layers if reason is not None else ():
                    layer.end(reason)
                self._state = state

    def learn(self, model: nn.Module, attending: Mapping[int, nn.Module]) -> None:
        """Find the decoder layers of the attention modules that ran in a step."""
        ran = set(attending.values())
        for name, stack in model.named_modules():
            for index, layer in enumerate(stack if isinstance(stack, nn.ModuleList) else ()):
                mine = [module for module in layer.modules() if module in ran]
                if len(mine) == 1 and mine[0] is not layer:
                    self.layers.append(CompiledLayer(self, f"{name}.{index}", layer, mine[0]))

    def program(
        self, layer: nn.Module, kind: Hashable, weights: Mapping[str, Tensor], call: LayerCall
    ) -> LayerProgram:
        """Return the program of a kind of layers and calls; compile it on a miss.

        Raises:
            Exception: one of `REASONS`, every time, where there can be none.
        """
        key = kind, self.code, call.kind()
        with _lock:
            if key not in self.programs:
                if len(self.programs) >= MAX_PROGRAMS:
                    raise RuntimeError(
                        f"{MAX_PROGRAMS} programs were compiled already; its state changes often"
                    )
                try:
                    self.programs[key] = compile_layer(layer, weights, call)
                except REASONS as error:
                    self.programs[key] = error
            found = self.programs[key]
        if isinstance(found, Exception):
            raise found
        return found

    def forget_refusals(self) -> None:
        """Let every layer that runs uncompiled be tried again."""
        self.refused.clear()
        for layer in self.layers:
            layer.forget_refusals()

    def refuse(self, name: str, reason: str) -> None:
        """Record why a layer runs uncompiled; log it once, as a warning after `compile`."""
        if reason not in self.refused.values():
            level = logging.WARNING if self.enabled else logging.INFO
            logger.log(level, "%s runs uncompiled: %s", name, reason)
        self.refused[name] = reason


class LayerSession:
    """One generation of a model: gives its layers compiled forwards, and checks them every step."""

    def __init__(self, owner: CompiledLayers, model: nn.Module, stack: ExitStack):
        self._owner = owner
        self._model = model
        self._stack = stack
        # Layers that another model shares may have the compiled forwards of that one.
        self._owners: list[CompiledLayers] = []

    def install(self) -> None:
        """Give the layers compiled forwards until the session ends, if they are wanted."""
        owner = self._owner
        if self._owners or not owner.layers or not owner.wanted:
            return
        known = {compiled.layer: compiled for compiled in owner.layers}

        def make(fresh: list[nn.Module]) -> dict[nn.Module, CompiledLayer]:
            return {layer: known[layer] for layer in fresh if "forward" not in vars(layer)}

        self._stack.enter_context(_forwards.lent(known, make))
        installed = (vars(layer).get("forward") for layer in known)
        owners = [one.owner for one in installed if isinstance(one, CompiledLayer)]
        self._owners = [*dict.fromkeys([owner, *owners])]
        for one in self._owners:
            one.join()
            self._stack.callback(one.leave)

    def begin_step(self) -> None:
        """Check that compiled layers are what they were compiled from, before a forward pass."""
        _here.compiled = self._owner.wanted
        for owner in self._owners:
            owner.refresh()

    def end_step(self, attending: Mapping[int, nn.Module]) -> None:
        """Learn from a step which attention modules take part in it."""
        owner = self._owner
        if self._owners or not owner.wanted:
            return
        if not owner.layers:
            owner.learn(self._model, attending)
        self.install()


@dataclass
class _Binding:
    """A layer as one session found it.

    Attributes:
        kind: key of what it computes, see `LayerState`.
        weights: its parameters and buffers by name.
        programs: by the kind of call.
        bound: the same by the shape of calls; None for those that run uncompiled.
    """

    kind: Hashable
    weights: dict[str, Tensor]
    programs: dict[object, BoundProgram] = field(default_factory=dict)
    bound: dict[object, BoundProgram | None] = field(default_factory=dict)


class CompiledLayer:
    """The forward of a decoder layer that is compiled."""

    def __init__(self, owner: CompiledLayers, name: str, layer: nn.Module, attention: nn.Module):
        self.layer = layer
        self.owner = owner
        self._name = name
        self._attention = attention
        # None where the layer runs uncompiled. Replaced as a whole: other threads read it.
        self._binding: _Binding | None = None
        # True if the program of a kind of layer and call equals the layer. A single token is a
        # kind of its own.
        self._tried: dict[Hashable, bool] = {}

    @property
    def is_compiled(self) -> bool:
        """True if all calls so far run compiled."""
        return bool(self._tried) and all(self._tried.values())

    def forget_refusals(self) -> None:
        """Let calls be tried again that run uncompiled."""
        for kind in [kind for kind, same in self._tried.items() if not same]:
            del self._tried[kind]
        if self._binding is not None:
            self._binding.bound.clear()

    def begin(self, state: LayerState) -> None:
        """Take the layer as it is now, and add it to the state that is watched."""
        binding, reason = None, _obstacle(self.layer)
        if reason is None:
            try:
                binding = _Binding(state.add(self.layer), tensors_of(self.layer))
            except UnwatchableError as error:
                reason = str(error)
        self._binding = binding
        if reason is not None:
            self.owner.refuse(self._name, reason)

    def end(self, reason: str | None = None) -> None:
        """Run uncompiled, and drop references to weights, until `begin`."""
        self._binding = None
        if reason is not None:
            self.owner.refuse(self._name, reason)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, compiled where it can be."""
        binding, step = self._binding, kwargs.get("spec_step")
        # Accelerate's mixed precision begins inside the model's forward.
        other = torch.is_grad_enabled() or torch.is_autocast_enabled("cpu") or _here.uncompiled
        if other or binding is None or type(step) is not PackedStep or not _here.compiled:
            return self._plain(*args, **kwargs)
        call = LayerCall(args, kwargs)
        looks, bound = call.looks, binding.bound
        if looks not in bound:
            if call.num_tokens > MAX_TOKENS:
                return self._plain(*args, **kwargs)
            kind = binding.kind, self.owner.code, call.kind(), call.num_tokens == 1
            if kind not in self._tried:
                return self._try(kind, call, binding)
            bound[looks] = self._bind(call, binding) if self._tried[kind] else None
        program = bound[looks]
        result = None if program is None else program(call, step)
        return self._plain(*args, **kwargs) if result is None else result

    def _plain(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of the layer's class, which may have been patched."""
        return type(self.layer).forward(self.layer, *args, **kwargs)

    def _try(self, kind: Hashable, call: LayerCall, binding: _Binding) -> Any:
        """Run a call of a new kind both ways; return the program's result if both are equal."""
        expected = self._plain(*call.args, **call.kwargs)
        start, reason, found = time.perf_counter(), None, None
        try:
            step = replace(call.kwargs["spec_step"], written={})
            found = self._bind(call, binding)(call, step)
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
            self.owner.refuse(self._name, reason)
        self._tried[kind] = reason is None
        self.owner.seconds += time.perf_counter() - start
        return expected if reason else found

    def _bind(self, call: LayerCall, binding: _Binding) -> BoundProgram:
        """Return the program of such calls with the weights of this layer."""
        kind, programs = call.kind(), binding.programs
        if kind not in programs:
            program = self.owner.program(self.layer, binding.kind, binding.weights, call)
            linears = linears_of(self.layer)
            programs[kind] = BoundProgram(program, binding.weights, linears, self._attention)
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
        # Hooks of the layer itself are called around it.
        harmless = module is layer or all(map(_is_harmless, hooks))
        # The forwards of packed linear layers are called by an operation of the program.
        own = vars(module).get("forward")
        replaced = own is not None and not isinstance(own, CompiledLayer)
        replaced = replaced and not has_fast_forward(module)
        if replaced or not harmless or hasattr(module, "_hf_hook"):
            return "it has hooks or a forward of its own"
    return None


def _is_harmless(hook: Callable[..., Any]) -> bool:
    """Return True for hooks of transformers, which collect outputs, and of hf_spec.

    Where hooks of hf_spec act inside a layer, it runs inside `uncompiled`.
    """
    return getattr(hook, "__module__", "").partition(".")[0] in ("transformers", "hf_spec")


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
