"""Compiled decoder layers of one model: each layer is traced, and generated code runs it.

A third or more of a small step is spent on small operations that are called one by one. On a CPU a
layer becomes one C++ function; on a GPU its small operations are fused (`fused_layer`). The first
call of every kind runs both compiled and uncompiled, and the results are compared. A
layer runs uncompiled, and the log names the reason, if it cannot be traced, if its result differs,
or if it reads state whose changes cannot be detected (`layer_state`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PreTrainedModel

from hf_spec.engine.fast.fused_layer import FusedFunction, FusedLayer, fuse_layer
from hf_spec.engine.fast.layer_call import BoundLayer
from hf_spec.engine.fast.layer_obstacles import obstacle
from hf_spec.engine.fast.layer_state import LayerState, UnwatchableError
from hf_spec.engine.fast.layer_tracing import (
    DOWN,
    MAX_TRACED_TOKENS,
    STEP,
    UP,
    LayerCall,
    LayerFunction,
    as_tuple,
    compile_layer,
    tensors_of,
)
from hf_spec.engine.fast.packed_linear import mode, packed_changes
from hf_spec.engine.forward.forward_overrides import ForwardOverrides
from hf_spec.engine.forward.low_rank_change import LowRankChange, changes_in
from hf_spec.engine.forward.model_cache import cached_per_model
from hf_spec.engine.forward.step import PackedStep

logger = logging.getLogger(__name__)

# Largest relative distance (of norms) between compiled and uncompiled results.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Functions compiled for one model. Layers whose state keeps changing would need ever more.
MAX_PROGRAMS = 16
# A longer call that other kernels run is a prompt: shorter calls may still run compiled.
MAX_STEP_TOKENS = 64
# Different arguments of layers in one step that are cached, such as those of global and local
# attention.
MAX_STEP_CALLS = 4


Function = LayerFunction | FusedFunction


@dataclass(frozen=True)
class Backend:
    """How layers are compiled for a type of device, and bound to weights; supported dtypes."""

    compile: Callable[[nn.Module, Mapping[str, Tensor], LayerCall], Any]
    bind: Callable[[Any, Mapping[str, Tensor], nn.Module, nn.Module], BoundLayer | FusedLayer]
    dtypes: tuple[torch.dtype, ...]


BACKENDS = {
    "cpu": Backend(compile_layer, BoundLayer, (torch.float32, torch.bfloat16)),
    "cuda": Backend(fuse_layer, FusedLayer, (torch.float32, torch.bfloat16, torch.float16)),
}


class _ThreadSettings(threading.local):
    # Overrides `CompiledLayers.enabled` of every model unless it is None.
    compile: bool | None = None
    # True if the current forward pass runs layers compiled.
    compiled: bool = False


_thread = _ThreadSettings()


@contextmanager
def compiling(wanted: bool | None) -> Iterator[None]:
    """Switch compiled layers on or off for all models that this thread runs inside the block.

    With None, `hf_spec.compile` of each model decides.
    """
    before, _thread.compile = _thread.compile, wanted
    try:
        yield
    finally:
        _thread.compile = before


# Errors of a layer that cannot be traced or compiled.
ERRORS = (AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)

_lock = threading.RLock()
_forwards = ForwardOverrides()


class CompiledLayers:
    """The compiled layers of one model, cached as long as the model lives.

    Attributes:
        enabled: True after `hf_spec.compile(model)`.
        layers: the decoder layers, found in the first step.
        functions: by kind of layer and call; an error where compiling failed.
        refused: why layers run uncompiled, by name.
        seconds: time spent on compiling and on comparing results.
        is_warm: True after a warm-up, until refused layers may be tried again.
    """

    def __init__(self) -> None:
        self.enabled = self.is_warm = False
        self.layers: list[CompiledLayer] = []
        self.functions: dict[object, Function | Exception] = {}
        self.refused: dict[str, str] = {}
        self.seconds = 0.0
        self._state: LayerState | None = None
        self._sessions = 0
        self._packed = 0
        # Long keys and the numbers that stand for them; hashing a long key takes microseconds.
        self._numbers: dict[Hashable, int] = {}

    @classmethod
    def of(cls, model: PreTrainedModel) -> CompiledLayers:
        """Return the compiled layers of a model."""
        return cached_per_model(model, "compiled layers", cls)

    @property
    def wanted(self) -> bool:
        """True if this thread runs the layers compiled where possible."""
        return self.enabled if _thread.compile is None else _thread.compile

    @contextmanager
    def active(self, model: nn.Module) -> Iterator[LayerSession]:
        """Run layers compiled inside the block, if wanted, as soon as they are found."""
        with ExitStack() as stack:
            session = LayerSession(self, model, stack)
            session.install()
            yield session

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count a session; the end of the last one frees everything that refers to weights."""
        with _lock:
            self._sessions += 1
        try:
            yield
        finally:
            with _lock:
                self._sessions -= 1
                if not self._sessions:
                    self._state = None
                    for layer in self.layers:
                        layer.binding = None

    def refresh(self) -> None:
        """Read the state of all layers again if it has changed."""
        with _lock:
            packed = packed_changes()
            if packed == self._packed and self._state is not None and self._state.holds():
                return
            state = LayerState()
            kinds = [self._add(layer, state) for layer in self.layers]
            try:
                code = self.number(state.seal())
            except UnwatchableError as error:
                kinds = [None] * len(kinds)
                for layer in self.layers:
                    self.refuse(layer.name, str(error))
            for layer, kind in zip(self.layers, kinds, strict=True):
                binding = None
                if kind is not None:
                    tensors, changes = tensors_of(layer.layer), _changes_of(layer.layer)
                    binding = _Binding(self.number((kind, code)), tensors, changes)
                # In one assignment: other threads read it without the lock.
                layer.binding = binding
            self._packed, self._state = packed, state

    def _add(self, layer: CompiledLayer, state: LayerState) -> Hashable | None:
        dtypes = {device: backend.dtypes for device, backend in BACKENDS.items()}
        reason = obstacle(layer.layer, dtypes, CompiledLayer)
        if reason is None:
            try:
                return state.add(layer.layer)
            except UnwatchableError as error:
                reason = str(error)
        self.refuse(layer.name, reason)
        return None

    def number(self, key: Hashable) -> int:
        """Return a number that is equal for equal keys."""
        with _lock:
            return self._numbers.setdefault(key, len(self._numbers))

    def key_of(self, call: LayerCall) -> int:
        """Return the number of a kind of calls, computed once per step; single tokens are one."""
        if call.key_owner is not self:
            key = call.program_key, call.num_tokens == 1
            call.key, call.key_owner = self.number(key), self
        return call.key

    def find_layers(self, model: nn.Module, attending: Mapping[int, nn.Module]) -> None:
        """Find the decoder layers, given the attention modules that ran in a step."""
        attentions = set(attending.values())
        for name, stack in model.named_modules():
            for index, layer in enumerate(stack if isinstance(stack, nn.ModuleList) else ()):
                inside = [module for module in layer.modules() if module in attentions]
                if len(inside) == 1 and inside[0] is not layer:
                    self.layers.append(CompiledLayer(self, f"{name}.{index}", layer, inside[0]))

    def function(self, layer: nn.Module, binding: _Binding, call: LayerCall) -> Function:
        """Return the function for a kind of layers and calls; compile it on a miss.

        Raises:
            Exception: one of `ERRORS` if compiling failed, now or earlier.
        """
        key = binding.kind, call.program_key
        with _lock:
            if key not in self.functions:
                if len(self.functions) >= MAX_PROGRAMS:
                    raise RuntimeError(
                        f"{MAX_PROGRAMS} kinds of layers were compiled already; its state changes "
                        "often"
                    )
                try:
                    compiled = BACKENDS[binding.device].compile
                    self.functions[key] = compiled(layer, binding.weights, call)
                except ERRORS as error:
                    self.functions[key] = error
            function = self.functions[key]
        if isinstance(function, Exception):
            raise function
        return function

    def forget_refusals(self) -> None:
        """Let every layer that runs uncompiled be tried again."""
        self.is_warm = False
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
    """One generation of a model: installs compiled forwards and checks them before every step."""

    def __init__(self, owner: CompiledLayers, model: nn.Module, stack: ExitStack):
        self._owner = owner
        self._model = model
        self._stack = stack
        # Layers shared with another model may have compiled forwards of that model.
        self._owners: list[CompiledLayers] = []

    def install(self) -> None:
        """Give the layers compiled forwards until the session ends, if they are wanted."""
        owner = self._owner
        if self._owners or not owner.layers or not owner.wanted:
            return
        by_module = {compiled.layer: compiled for compiled in owner.layers}

        def make(layers: list[nn.Module]) -> dict[nn.Module, CompiledLayer]:
            return {layer: by_module[layer] for layer in layers if "forward" not in vars(layer)}

        self._stack.enter_context(_forwards.install(by_module, make))
        forwards = (vars(layer).get("forward") for layer in by_module)
        owners = [forward.owner for forward in forwards if isinstance(forward, CompiledLayer)]
        self._owners = [*dict.fromkeys([owner, *owners])]
        for other in self._owners:
            self._stack.enter_context(other.in_use())

    def begin_step(self) -> None:
        """Run layers compiled if wanted; call before every forward pass."""
        _thread.compiled = self._owner.wanted

    def refresh(self) -> None:
        """Compile layers again where their state has changed; call before layers run.

        The replay of a CUDA graph runs none.
        """
        for owner in self._owners:
            owner.refresh()

    def end_step(self, attending: Mapping[int, nn.Module]) -> None:
        """Find the layers in the first step, given the attention modules that ran in it."""
        owner = self._owner
        if self._owners or not owner.wanted:
            return
        if not owner.layers:
            owner.find_layers(self._model, attending)
        self.install()


@dataclass
class _Binding:
    """A layer with the weights that it has in one state.

    Attributes:
        kind: number of all that it computes, code included.
        weights: parameters and buffers by name.
        changes: low-rank changes of linear layers that are installed, by name of the weight.
        bound: functions with these weights.
    """

    kind: int
    weights: dict[str, Tensor]
    changes: list[tuple[str, LowRankChange]] = field(default_factory=list)
    bound: dict[Function, BoundLayer | FusedLayer] = field(default_factory=dict)
    _changed: dict[tuple[LowRankChange, ...], _Binding] = field(default_factory=dict)

    @cached_property
    def device(self) -> str:
        """Type of the device of the weights, a key of `BACKENDS`."""
        return next(iter(self.weights.values())).device.type

    def changed(self, owner: CompiledLayers) -> _Binding:
        """Return the binding with the low-rank changes that act in this thread's forward pass."""
        acting = [(name, change) for name, change in self.changes if change.acts]
        key = tuple(change for _, change in acting)
        assert len(dict(acting)) == len(acting), "one adapter acts at a time"
        if key not in self._changed:
            weights, forms = dict(self.weights), []
            for name, change in acting:
                parts = change.down, change.up.T
                weights |= zip((name + DOWN, name + UP), parts, strict=True)
                forms.append((name, *((part.dtype, part.shape, part.stride()) for part in parts)))
            self._changed[key] = _Binding(owner.number((self.kind, tuple(forms))), weights)
        return self._changed[key]


class CompiledLayer:
    """The forward of a decoder layer that is compiled.

    Attributes:
        binding: None where the layer runs uncompiled. Replaced as a whole: other threads read it.
    """

    def __init__(self, owner: CompiledLayers, name: str, layer: nn.Module, attention: nn.Module):
        self.layer = layer
        self.owner = owner
        self.name = name
        self.binding: _Binding | None = None
        self._attention = attention
        # By kind of layer and call: the function that gave the layer's result, if there is one.
        self._tried: dict[tuple[int, int], Function | None] = {}

    @property
    def is_compiled(self) -> bool:
        """True if all calls so far run compiled."""
        return bool(self._tried) and all(self._tried.values())

    def forget_refusals(self) -> None:
        """Let calls that run uncompiled be tried again."""
        self._tried = {key: tried for key, tried in self._tried.items() if tried is not None}

    def __call__(self, *args: Any, spec_step: Any = None, **kwargs: Any) -> Any:
        """Run the layer, compiled if possible."""
        binding = self.binding
        # Accelerate's mixed precision begins inside the model's forward.
        if (
            binding is None
            or type(spec_step) is not PackedStep
            or not _thread.compiled
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled(binding.device)
        ):
            return self._run_uncompiled(args, kwargs, spec_step)
        if spec_step.gate is not None:
            binding = binding.changed(self.owner)
        call = _step_call(spec_step, args, kwargs)
        if call.num_tokens > MAX_TRACED_TOKENS:
            return self._run_uncompiled(args, kwargs, spec_step)
        key = binding.kind, self.owner.key_of(call)
        if key not in self._tried:
            return self._try(key, call, binding, (args, kwargs, spec_step))
        function = self._tried[key]
        result = None if function is None else self._bind(function, binding)(call, spec_step)
        return self._run_uncompiled(args, kwargs, spec_step) if result is None else result

    def _run_uncompiled(self, args: Any, kwargs: Any, step: PackedStep | None) -> Any:
        """Run the forward of the layer's class, which may have been patched."""
        forward = type(self.layer).forward
        if step is None:
            return forward(self.layer, *args, **kwargs)
        return forward(self.layer, *args, spec_step=step, **kwargs)

    def _try(self, key: tuple[int, int], call: LayerCall, binding: _Binding, arguments: Any) -> Any:
        """Run the first call of a kind both ways; return the compiled result if both are equal."""
        expected = self._run_uncompiled(*arguments)
        # A step that is about to be captured must not wait for the device; this may.
        with _disable_current_modes():
            return self._compare(key, call, binding, arguments, expected)

    def _compare(
        self,
        key: tuple[int, int],
        call: LayerCall,
        binding: _Binding,
        arguments: Any,
        expected: Any,
    ) -> Any:
        """Compile a call; return its result if it is the expected one."""
        start, reason = time.perf_counter(), None
        function, result = None, None
        try:
            function = self.owner.function(self.layer, binding, call)
            result = self._bind(function, binding)(call, replace(arguments[2], written={}))
        # Errors of a layer while it is traced, a missing compiler, or a missing cache folder.
        except ERRORS as error:
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
        else:
            if result is None and (call.num_tokens > MAX_STEP_TOKENS or mode.prompt):
                # The kernels that run steps may leave out prompts.
                return expected
            if result is None:
                reason = "other kernels run its linear layers or its attention"
            elif not _agree(result, expected):
                reason = "its compiled layer computes something else"
        if reason is not None:
            self.owner.refuse(self.name, reason)
        self._tried[key] = None if reason else function
        self.owner.seconds += time.perf_counter() - start
        return expected if reason else result

    def _bind(self, function: Function, binding: _Binding) -> BoundLayer | FusedLayer:
        if function not in binding.bound:
            bind = BACKENDS[binding.device].bind
            bound = bind(function, binding.weights, self.layer, self._attention)
            binding.bound[function] = bound
        return binding.bound[function]


def _step_call(step: PackedStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
    kwargs = {**kwargs, STEP: None}
    for call in step.layer_calls:
        if call.repeat(args, kwargs):
            return call
    call = LayerCall(args, kwargs, step.gate)
    if len(step.layer_calls) < MAX_STEP_CALLS:
        step.layer_calls.append(call)
    return call


def _changes_of(layer: nn.Module) -> list[tuple[str, LowRankChange]]:
    modules = layer.named_modules()
    return [(f"{name}.weight", change) for name, part in modules for change in changes_in(part)]


def _agree(result: Any, expected: Any) -> bool:
    """Return True if results are equal up to rounding and not all zero."""
    for part, other in zip(as_tuple(result), as_tuple(expected), strict=True):
        if isinstance(other, Tensor):
            limit = TOLERANCE.get(other.dtype, 0.0) * other.norm()
            if part.shape != other.shape or not (part - other).norm() < limit:
                return False
    return True
