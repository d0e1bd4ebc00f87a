"""Replaces an attribute of modules, such as their forward, inside blocks that may overlap.

Blocks may overlap in several threads, and models may share modules. The first block that needs a
module replaces its attribute; the end of the last one restores it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

# Modules -> replacements of the attributes of some or all of them.
Make = Callable[[list[nn.Module]], Mapping[nn.Module, Any]]


class ForwardOverrides:
    """Modules in which an attribute is replaced by one kind of override."""

    def __init__(self, attribute: str = "forward") -> None:
        self._attribute = attribute
        # Override, attribute that the module had instead of its class's or None, number of users.
        self._installed: WeakKeyDictionary[nn.Module, tuple[Any, Any, int]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def install(self, modules: Iterable[nn.Module], make: Make) -> Iterator[None]:
        """Override attributes of modules inside a block; `make` builds those that are missing."""
        with self._lock, ExitStack() as stack:
            fresh = []
            for module in modules:
                if module not in self._installed:
                    fresh.append(module)
                    continue
                forward, before, users = self._installed[module]
                self._installed[module] = forward, before, users + 1
                stack.callback(self._leave, module)
            for module, forward in make(fresh).items():
                self._installed[module] = forward, module.__dict__.get(self._attribute), 1
                module.__dict__[self._attribute] = forward
                stack.callback(self._leave, module)
            leave = stack.pop_all()
        try:
            yield
        finally:
            with self._lock:
                leave.close()

    def has(self, module: nn.Module) -> bool:
        """Return True if the current attribute of a module is the override."""
        current = module.__dict__.get(self._attribute)
        return current is not None and self._installed.get(module, (None,))[0] is current

    def is_installed(self, module: nn.Module) -> bool:
        """Return True if a block overrides the attribute of a module."""
        return module in self._installed

    def _leave(self, module: nn.Module) -> None:
        """Count one user less; restore the module after the last one."""
        forward, before, users = self._installed.pop(module)
        if users > 1:
            self._installed[module] = forward, before, users - 1
        elif module.__dict__.get(self._attribute) is forward:
            module.__dict__.pop(self._attribute, None)
            if before is not None:
                module.__dict__[self._attribute] = before
