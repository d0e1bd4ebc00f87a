"""Forwards of their own that modules have for a while, in any number of blocks that overlap.

Blocks may overlap in several threads, and models may share modules. A module gets its forward from
the first block that wants one and gives it back when the last one ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

# Modules -> the forwards of those among them that shall have one.
Make = Callable[[list[nn.Module]], Mapping[nn.Module, Callable[..., Any]]]


class ForwardOverrides:
    """The modules that have a forward of one kind."""

    def __init__(self) -> None:
        # The forward, the one that the module itself had instead of its class's, and the users.
        self._given: WeakKeyDictionary[nn.Module, tuple[Any, Any, int]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    @contextmanager
    def install(self, modules: Iterable[nn.Module], make: Make) -> Iterator[None]:
        """For one block modules have their forwards; `make` is asked for those that have none."""
        with self._lock, ExitStack() as stack:
            fresh = []
            for module in modules:
                if self._join(module):
                    stack.callback(self._leave, module)
                else:
                    fresh.append(module)
            for module, forward in make(fresh).items():
                self._give(module, forward)
                stack.callback(self._leave, module)
            leave = stack.pop_all()
        try:
            yield
        finally:
            with self._lock:
                leave.close()

    def has(self, module: nn.Module) -> bool:
        """Whether the forward that a module has now is the one from here."""
        own = module.__dict__.get("forward")
        return own is not None and self._given.get(module, (None,))[0] is own

    def _join(self, module: nn.Module) -> bool:
        """Count one more user if the module has its forward already."""
        if module not in self._given:
            return False
        forward, before, users = self._given[module]
        self._given[module] = forward, before, users + 1
        return True

    def _give(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        """Give a module its forward, for one user."""
        self._given[module] = forward, module.__dict__.get("forward"), 1
        module.__dict__["forward"] = forward

    def _leave(self, module: nn.Module) -> None:
        """Count one user less; after the last one the module is as it was."""
        forward, before, users = self._given.pop(module)
        if users > 1:
            self._given[module] = forward, before, users - 1
        elif module.__dict__.get("forward") is forward:
            del module.__dict__["forward"]
            if before is not None:
                module.__dict__["forward"] = before
