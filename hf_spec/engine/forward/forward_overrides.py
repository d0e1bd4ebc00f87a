"""Replaces the forward of modules inside blocks that may overlap.

Blocks may overlap in several threads, and models may share modules. The first block that needs a
module replaces its forward; the end of the last one restores it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

# Modules -> replacements of the forwards of some or all of them.
Make = Callable[[list[nn.Module]], Mapping[nn.Module, Callable[..., Any]]]


class ForwardOverrides:
    """Modules whose forward is replaced by one kind of override."""

    def __init__(self) -> None:
        # Override, forward that the module had instead of its class's or None, number of users.
        self._installed: WeakKeyDictionary[nn.Module, tuple[Any, Any, int]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def install(self, modules: Iterable[nn.Module], make: Make) -> Iterator[None]:
        """Override the forwards of modules inside a block; `make` builds those that are missing."""
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
                self._installed[module] = forward, module.__dict__.get("forward"), 1
                module.__dict__["forward"] = forward
                stack.callback(self._leave, module)
            leave = stack.pop_all()
        try:
            yield
        finally:
            with self._lock:
                leave.close()

    def has(self, module: nn.Module) -> bool:
        """Return True if the current forward of a module is the override."""
        current = module.__dict__.get("forward")
        return current is not None and self._installed.get(module, (None,))[0] is current

    def _leave(self, module: nn.Module) -> None:
        """Count one user less; restore the module after the last one."""
        forward, before, users = self._installed.pop(module)
        if users > 1:
            self._installed[module] = forward, before, users - 1
        elif module.__dict__.get("forward") is forward:
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before
