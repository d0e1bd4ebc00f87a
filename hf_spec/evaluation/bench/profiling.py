"""Time of a generation by part of a decoding step (`hf-spec bench --profile`).

Inside `profiled` the methods of `_SEAMS` are replaced by timed ones. Each part is charged the time
that it spends outside the others. There is no overhead outside the context. On a GPU every seam
synchronizes: the shares are right, but the total is slower than unprofiled.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import NodeProcessors
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.engine.forward.row_storage import RowStorage
from hf_spec.engine.model_call import ModelCall
from hf_spec.engine.runner import ModelRunner
from hf_spec.evaluation.bench.runner import synchronize
from hf_spec.methods.eagle.head import EagleHead
from hf_spec.methods.falcon.head import FalconHead
from hf_spec.methods.feature_pairs.runner import HeadRunner

# In the order of a step; "draft: ..." are the parts inside a drafter.
PARTS = (
    "draft: forward",
    "draft: layout",
    "draft: KV moves",
    "draft: rest",
    "verify: forward",
    "verify: layout",
    "verification",
    "processors",
    "commit",
    "KV moves",
    "observe",
    "rest",
)
_DRAFTING = "draft: rest"
_OBSERVING = "observe"
# Name of a part when a drafter runs it.
_IN_DRAFT = {
    "verify: forward": "draft: forward",
    "verify: layout": "draft: layout",
    "KV moves": "draft: KV moves",
    "processors": _DRAFTING,
}


# Timed methods and their parts; overrides in subclasses are timed too.
_SEAMS = (
    (ModelCall, "__call__", "verify: forward"),
    (ModelRunner, "forward", "verify: layout"),
    (EagleHead, "mix", "verify: forward"),
    (EagleHead, "attend", "verify: forward"),
    (FalconHead, "mix", "verify: forward"),
    (FalconHead, "attend", "verify: forward"),
    (HeadRunner, "top_tokens", "verify: forward"),
    (NodeProcessors, "__call__", "processors"),
    (ModelRunner, "keep", "KV moves"),
    (RowStorage, "keep", "KV moves"),
    (GenerationState, "commit", "commit"),
    (Drafter, "draft", _DRAFTING),
    (Drafter, "observe", _OBSERVING),
    (Verifier, "verify", "verification"),
)


class _Clock:
    """Stopwatch that charges the time since its last reading to the innermost part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open = ["rest"]
        synchronize()
        self._since = time.perf_counter()

    def charge(self) -> None:
        synchronize()
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            in_draft = _DRAFTING in self._open or _OBSERVING in self._open
            self.charge()
            self._open.append(_IN_DRAFT.get(part, part) if in_draft else part)
            try:
                return method(*args, **kwargs)
            finally:
                self.charge()
                self._open.pop()

        return call


@contextmanager
def profiled() -> Iterator[dict[str, float]]:
    """Yield seconds by part of `PARTS`; complete when the block ends."""
    clock = _Clock()
    with ExitStack() as originals:
        for base, name, part in _SEAMS:
            for owner in _with_subclasses(base):
                if (method := vars(owner).get(name)) is not None:
                    originals.callback(setattr, owner, name, method)
                    setattr(owner, name, clock.timed(method, part))
        yield clock.seconds
        clock.charge()


def _with_subclasses(base: type[Any]) -> Iterator[type]:
    yield base
    for child in base.__subclasses__():
        yield from _with_subclasses(child)
