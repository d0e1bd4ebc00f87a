"""Positions of tree tokens for models that take none and count stored tokens instead.

Decoders of the BART family look up their positions in a table of their own, which is told how many
tokens came before. In a tree that does not say where a token stands. So while a generation runs,
the tables ask which positions the forward of their thread has; without any they count as ever.

Counting like that takes padding for tokens. Rows are told the same here: `padding_of`.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.common.compat import CACHE_LENGTH_NAMES
from hf_spec.engine.fast.forward_overrides import ForwardOverrides


def tables_of(model: PreTrainedModel) -> list[nn.Module]:
    """The tables of a model that takes no positions; none if it takes some, or if it has none."""
    if {"position_ids", "decoder_position_ids"} & set(inspect.signature(model.forward).parameters):
        return []
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        # Of the class: while a generation runs, the module has another one.
        and _counts_or_takes_positions(inspect.signature(type(module).forward).parameters)
    ]


def _counts_or_takes_positions(parameters: Collection[str]) -> bool:
    """Return True for a table that counts cached tokens unless it is given positions."""
    return "position_ids" in parameters and not set(CACHE_LENGTH_NAMES).isdisjoint(parameters)


def padding_of(model: PreTrainedModel, attention_mask: Tensor) -> list[int]:
    """Per row of a (B, L) mask how many padding tokens the model takes for tokens."""
    counts = bool(tables_of(model))
    return (attention_mask == 0).sum(dim=1).tolist() if counts else [0] * len(attention_mask)


class _Forward(threading.local):
    """(B, T) int64, the positions of the forward of this thread."""

    positions: Tensor | None = None


_forward = _Forward()
# Of tables whose models are active.
_forwards = ForwardOverrides()


class _Lookup:
    """The forward of a table: at the positions of the forward that runs in this thread."""

    def __init__(self, table: nn.Module):
        self.plain = table.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        positions = _forward.positions
        if positions is None:
            return self.plain(*args, **kwargs)
        # Some put a dimension in front; the values are those of one line in all of them.
        found = self.plain(args[0], position_ids=positions.flatten())
        return found.view(*positions.shape, -1)


def active(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Let the tables of a model ask for positions."""
    return _forwards.install(tables_of(model), lambda fresh: {one: _Lookup(one) for one in fresh})


@contextmanager
def told(positions: Tensor) -> Iterator[None]:
    """Run one forward of an active model at (B, T) int64 positions."""
    before, _forward.positions = _forward.positions, positions
    try:
        yield
    finally:
        _forward.positions = before
