"""Two tiers of tests: the default one takes minutes, the full one has every case.

`@pytest.mark.full` moves a test to the full tier. `@pytest.mark.by_default(name=("llama",))` moves
all cases of a parametrized test there whose parameter `name` has another value. Other objects than
strings are selected by their `id` or `__name__`, as in the test's id, or by a function. A case runs
by default if all `by_default` markers and all their arguments select it.
"""

from __future__ import annotations

from typing import Any

import pytest

# A chain, a tree, a head, and adaptive tokens.
FEW_STRATEGIES = ("lookup", "tree", "falcon", "sdsat")


def runs_by_default(item: pytest.Item) -> bool:
    """Return True for a case that all `by_default` markers select, unless it runs another tool.

    Raises:
        pytest.UsageError: if a marker names a parameter that the test lacks.
    """
    if any(item.iter_markers("integration")):
        return False
    for marker in item.iter_markers("by_default"):
        parameters = item.callspec.params  # type: ignore[attr-defined]
        for name, selected in marker.kwargs.items():
            if name not in parameters:
                raise pytest.UsageError(f"{item.nodeid}: by_default names no parameter {name!r}")
            if not _selects(selected, parameters[name]):
                return False
    return True


def _selects(selected: Any, value: Any) -> bool:
    if callable(selected):
        return bool(selected(value))
    names = (value, getattr(value, "id", None), getattr(value, "__name__", None))
    return any(name is not None and name in selected for name in names)
