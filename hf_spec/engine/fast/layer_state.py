"""Python state that compiled layers were traced with, and a cheap check that it is unchanged.

Tracing turns everything that Python reads into constants: attributes of modules and of objects in
them, configs, functions, class attributes, globals of the modeling file. *Keys* of this state are
equal for layers that compute the same with other weights. *Views* of it are compared by identity
before every forward pass of a target, which takes 1.5 of 32 ms with 28 layers in 4 bits, and before
every draft. Functions of PyTorch, NumPy and the standard library are not followed.
"""

from __future__ import annotations

import collections
import enum
import functools
import logging
import re
import sys
import threading
import types
from collections.abc import Callable, Collection, Hashable, Iterable
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from hf_spec.backend.cpu.eight_bit import is_dynamic
from hf_spec.backend.cpu.four_bit import is_four_bit
from hf_spec.engine.forward.low_rank_change import changes_in

# Compared by value. Lists and objects that hold them are followed.
ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), range, enum.Enum),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
# Followed to the functions and objects in them.
CALLABLES = (types.FunctionType, types.MethodType, functools.partial)
# Compared by identity: their contents do not affect the result of a layer.
OPAQUE = (
    *(types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType, re.Pattern),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType),
    *(types.MemberDescriptorType, logging.Logger),
    *(torch._ops.OpOverloadPacket, torch._ops.OpOverload),
)
# Packages whose functions and classes are compared by identity and not followed.
TRUSTED = {*sys.stdlib_module_names, "torch", "numpy", "bitsandbytes"}
# Attributes of every module; the index of a layer only selects the KV buffer that it writes.
STANDARD = {*vars(nn.Module()), "forward", "layer_idx"}
# In transformers only functions and classes of modules are followed.
TRANSFORMERS = "transformers"
# Attributes of bitsandbytes' 8-bit layers that compiled layers read.
EIGHT_BIT = ("state.CB", "state.SCB", "state.threshold", "state.has_fp16_weights")
# The same of 4-bit layers, and of the quantization state of their weights, if it has them.
FOUR_BIT = {"compute_dtype", "compute_type_is_set", "support_avx512bf16_for_cpu"}
FOUR_BIT_STATE = {"absmax", "quant_type", "packing_format_for_cpu"}
# More values than any layer of transformers reads; a layer that reads more is not compiled.
MAX_VALUES = 20_000
# Attributes that Python looks up in the class of a module in every call.
CALLS = ("forward", "__call__", "__getattr__", "__getattribute__")


class UnwatchableError(Exception):
    """A layer reads state whose changes cannot be detected."""


class Same:
    """Value in a key, compared by identity and held alive."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


class LayerState:
    """State of the layers of one model: `add` each layer, then `seal`."""

    def __init__(self) -> None:
        # `read(source)` of all views, concatenated, must still be the same objects.
        self._views: list[tuple[Callable[[Any], Iterable[Any]], Any]] = []
        self._seen: list[Any] = []
        self._sized: list[Collection[Any]] = [
            every_module._global_forward_hooks,
            every_module._global_forward_pre_hooks,
        ]
        self._sizes = [*map(len, self._sized)]
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []
        # Keys of values by id, and the values, held alive so that ids stay unique.
        self._keys: dict[int, Hashable] = {}
        self._alive: list[Any] = []
        # Classes and functions whose code the layers run.
        self._roots: dict[types.FunctionType | type, None] = {}

    def add(self, layer: nn.Module) -> Hashable:
        """Add a layer; return a key of its modules, their attributes and shapes of their tensors.

        Raises:
            UnwatchableError: for state that cannot be watched; `seal` raises it as well.
        """
        parts = []
        for name, module in layer.named_modules():
            self._roots[type(module)] = None
            parts.append((name, Same(type(module)), self._attributes(module)))
            stores = [module._parameters, module._buffers, module._modules]
            if module is not layer:
                stores += [module._forward_hooks, module._forward_pre_hooks]
            for store in stores:
                self.watch_sized(store)
                if store:
                    self.view(dict.values, store)
            for change in changes_in(module):
                self.view(attrgetter("down", "up"), change)
                self._watch_addresses(change.down, change.up)
        tensors = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
        self._watch_addresses(*tensors.values())
        shapes = tuple((n, t.dtype, t.shape, t.stride()) for n, t in tensors.items())
        return tuple(parts), shapes

    def seal(self) -> Hashable:
        """Follow the code of all layers that were added; return its key."""
        return _Reach(self, self._roots).key()

    def holds(self) -> bool:
        """Return True if the state has not changed since the layers were added."""
        if [*map(len, self._sized)] != self._sizes:
            return False
        # Subclasses, such as weights in 4 bits, take ten times as long otherwise.
        with torch._C.DisableTorchFunctionSubclass():
            addresses = [*map(Tensor.data_ptr, self._tensors)]
        if addresses != self._addresses:
            return False
        try:
            # All containers have as many entries as before, so both sequences have equal length.
            # A list of the views would start the garbage collector in every step.
            values = (read(source) for read, source in self._views)
            return all(map(is_, chain.from_iterable(values), self._seen))
        except (KeyError, AttributeError, ValueError):
            return False

    def value(self, value: Any, where: str) -> Hashable:
        """Watch a value that layers may read at the location `where`; return its key."""
        if isinstance(value, ATOMS):
            return type(value), repr(value) if isinstance(value, (float, complex)) else value
        if id(value) not in self._keys:
            if len(self._keys) > MAX_VALUES:
                raise UnwatchableError(f"it reads more than {MAX_VALUES} values")
            self._alive.append(value)
            # The key of values that refer to themselves.
            self._keys[id(value)] = "cycle", len(self._keys)
            self._keys[id(value)] = self._content(value, where)
        return self._keys[id(value)]

    def watch(self, names: Collection[str], source: Any) -> None:
        """Watch some entries of a dictionary, which may be that of a class."""
        if names:
            # Two names at least, so that `itemgetter` returns a tuple.
            self.view(itemgetter(*names) if len(names) > 1 else itemgetter(*names, *names), source)

    def watch_sized(self, source: Collection[Any]) -> None:
        """Watch the number of entries of a container."""
        self._sized.append(source)
        self._sizes.append(len(source))

    def view(self, read: Callable[[Any], Iterable[Any]], source: Any) -> None:
        """Watch the objects that `read(source)` returns."""
        self._views.append((read, source))
        self._seen += read(source)

    def _watch_addresses(self, *tensors: Tensor) -> None:
        self._tensors += tensors
        self._addresses += map(Tensor.data_ptr, tensors)

    def _attributes(self, module: nn.Module) -> Hashable:
        attributes = vars(module)
        names = sorted(attributes.keys() - STANDARD)
        if is_dynamic(module):
            # bitsandbytes also stores what it found in its last call.
            names.remove("state")
            self.view(attrgetter("state", *EIGHT_BIT), module)
        elif is_four_bit(module):
            # Compiled layers run none of its Python code.
            names = sorted(attributes.keys() & FOUR_BIT)
            self._watch_four_bit(module.weight)
        others = [name for name in ("training", "layer_idx", "forward") if name in attributes]
        self.watch_sized(attributes)
        self.watch([*names, *others], attributes)
        return tuple(
            (name, self.value(attributes[name], f"{type(module).__name__}.{name}"))
            for name in names
        )

    def _watch_four_bit(self, weight: Any) -> None:
        attributes = vars(weight)
        self.watch_sized(attributes)
        self.watch(attributes.keys() & {"quant_state"}, attributes)
        if (quantization := attributes.get("quant_state")) is not None:
            values = vars(quantization)
            self.watch_sized(values)
            self.watch(values.keys() & FOUR_BIT_STATE, values)
            self._watch_addresses(quantization.absmax)

    def _content(self, value: Any, where: str) -> Hashable:
        if isinstance(value, Tensor):
            # A layer that reads a tensor that is neither parameter nor buffer is not compiled.
            return "tensor", value.dtype
        if isinstance(value, nn.Module):
            raise UnwatchableError(f"{where} holds a module that is not a submodule")
        if isinstance(value, (dict, collections.UserDict)):
            self.watch_sized(value)
            self.view(lambda values: (*values, *values.values()), value)
            parts = (self.value(part, f"{where}[{key!r}]") for key, part in value.items())
            return type(value).__name__, tuple(map(self._name, value)), tuple(parts)
        if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
            if not isinstance(value, (tuple, frozenset)):
                self.watch_sized(value)
                self.view(iter, value)
            return type(value).__name__, tuple(self.value(part, where) for part in value)
        if isinstance(value, (type, *OPAQUE)) or type(value).__module__ == "typing":
            return Same(value)
        if isinstance(value, CALLABLES) or hasattr(value, "__wrapped__"):
            return self._of_callable(value, where)
        return self._of_object(value, where)

    def _of_callable(self, value: Any, where: str) -> Hashable:
        if isinstance(value, types.FunctionType):
            return self._of_function(value, where)
        if isinstance(value, types.MethodType):
            owner = value.__self__
            by_identity = isinstance(owner, (nn.Module, type))
            return self.value(value.__func__, where), (
                Same(owner) if by_identity else self.value(owner, where)
            )
        if isinstance(value, functools.partial):
            return self.value((value.func, value.args, value.keywords), where)
        # A cached function, or another wrapper written in C.
        return Same(value), self.value(value.__wrapped__, where)

    def _name(self, key: Any) -> Hashable:
        return key if isinstance(key, ATOMS) else Same(key)

    def _of_function(self, function: types.FunctionType, where: str) -> Hashable:
        if is_trusted(function):
            return Same(function)
        self._roots[function] = None
        self.view(attrgetter("__code__", "__defaults__", "__kwdefaults__"), function)
        cells: list[Any] = []
        for cell in function.__closure__ or ():
            self.view(_cell, cell)
            cells += _cell(cell)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        parts = (part for part in (*cells, *defaults) if not isinstance(part, nn.Module))
        return (
            Same(function),
            function.__code__,
            tuple(self.value(part, f"{where} (closure or default)") for part in parts),
        )

    def _of_object(self, value: Any, where: str) -> Hashable:
        attributes, slots = getattr(value, "__dict__", None), _slots(type(value))
        is_opaque = attributes is None and not slots
        if is_opaque or isinstance(value, threading.local):
            raise UnwatchableError(
                f"{where} is of type {type(value).__name__}, whose changes cannot be detected"
            )
        if not _is_of(TRANSFORMERS, type(value)):
            self._roots[type(value)] = None
        parts = []
        if attributes is not None:
            self.watch_sized(attributes)
            self.watch([*attributes], attributes)
            parts += [(n, self.value(part, f"{where}.{n}")) for n, part in attributes.items()]
        if slots := [name for name in slots if hasattr(value, name)]:
            self.view(attrgetter(*slots, *slots), value)
            parts += [(name, self.value(getattr(value, name), where)) for name in slots]
        return Same(type(value)), tuple(parts)


class _Reach:
    """Functions and class attributes that classes and functions can reach by name."""

    def __init__(self, state: LayerState, roots: dict[types.FunctionType | type, None]):
        self._state = state
        # Grows as values are followed.
        self._roots = roots
        self._names: set[str] = set(CALLS)
        self._read: set[Any] = set()
        self._keys: list[Hashable] = []

    def key(self) -> Hashable:
        """Follow all roots; return the key of everything that was read."""
        size = -1
        while size != len(self._roots) + len(self._names):
            size = len(self._roots) + len(self._names)
            for root in [*self._roots]:
                if isinstance(root, type):
                    self._read_class(root)
                elif root not in self._read:
                    self._read.add(root)
                    self._read_function(root)
        return tuple(self._keys)

    def _read_class(self, kind: type) -> None:
        for base in kind.__mro__:
            attributes = vars(base)
            if base not in self._read and not is_trusted(base):
                self._read.add(base)
                self._state.watch_sized(attributes)
            names = CALLS if is_trusted(base) else self._names
            fresh = [name for name in sorted(names) if (base, name) not in self._read]
            fresh = [name for name in fresh if name in attributes]
            self._read.update((base, name) for name in fresh)
            self._state.watch(fresh, attributes)
            for name in fresh:
                self._follow(attributes[name], f"{base.__name__}.{name}")

    def _read_function(self, function: types.FunctionType) -> None:
        names = _names_in(function.__code__)
        self._names |= names
        module_globals = function.__globals__
        read = sorted(names & module_globals.keys())
        self._state.watch(read, module_globals)
        for name in read:
            self._follow(module_globals[name], f"{function.__module__}.{name}")

    def _follow(self, value: Any, where: str) -> None:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.cached_property):
            value = value.func
        if isinstance(value, type) and not is_trusted(value) and not _is_of(TRANSFORMERS, value):
            self._roots[value] = None
        if not isinstance(value, nn.Module):
            self._keys.append((where, self._state.value(value, where)))


def is_trusted(value: Any) -> bool:
    """Return True for functions and classes of packages that are not followed."""
    return (getattr(value, "__module__", None) or "builtins").partition(".")[0] in TRUSTED


def _is_of(package: str, value: type) -> bool:
    return value.__module__.partition(".")[0] == package


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names of globals and attributes in a function and in functions defined in it."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            # `getattr` may take it.
            names.add(constant)
    return names


def _slots(kind: type) -> list[str]:
    names = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    flat = chain.from_iterable([n] if isinstance(n, str) else n for n in names)
    return [name for name in flat if name not in ("__dict__", "__weakref__")]


def _cell(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()
