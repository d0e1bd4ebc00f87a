"""Time of a generation by part of a decoding step, and of a target forward pass by tree nodes.

Inside `profiled` the methods of `_SEAMS` are replaced by timed ones. Each part is charged the time
that it spends outside the others. There is no overhead outside the context. On a GPU every seam
synchronizes: the shares are right, but the total is slower than unprofiled.
"""

from __future__ import annotations

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_spec.backend.cpu.packed_weights import set_cpu_packing
from hf_spec.common.compat import cache_argument
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.logits_processors import NodeProcessors
from hf_spec.engine.decode.verifiers import Verifier
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.row_storage import RowStorage
from hf_spec.engine.model_call import ModelCall
from hf_spec.engine.runner import ModelRunner
from hf_spec.evaluation.bench.runner import synchronize, timed
from hf_spec.methods.block.runner import BlockRunner
from hf_spec.methods.feature_pairs.draft_head import PairHead
from hf_spec.methods.feature_pairs.runner import HeadRunner
from hf_spec.methods.medusa.heads import NewestFeatures

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
NODE_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
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
    (PairHead, "mix", "verify: forward"),
    (PairHead, "attend", "verify: forward"),
    (HeadRunner, "top_tokens", "verify: forward"),
    (BlockRunner, "propose", "verify: forward"),
    (NewestFeatures, "propose", "verify: forward"),
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


def measure_step_cost(
    model: PreTrainedModel, context: list[int], repeats: int, counts: tuple[int, ...] = NODE_COUNTS
) -> dict[str, dict[int, list[float]]]:
    """Time forward passes over trees of several sizes, root included, after the same context.

    Each of the `repeats` runs every form and size once, interleaved. Returns form -> node count ->
    seconds of each repetition. The form "transformers" runs the same number of tokens after a
    `DynamicCache`, like `generate()` and its assisted decoding. "off" and "auto" are our tree
    forward pass without and with packed weights; devices other than a CPU have only "auto".
    """
    modes = ("off", "auto") if model.device.type == "cpu" else ("auto",)
    seconds: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    with torch.no_grad():
        for repeat in range(repeats + 1):
            rounds = [("transformers", n, _plain_step(model, context, n)) for n in counts]
            for mode in modes:
                set_cpu_packing(mode)
                rounds += [(mode, n, _tree_step(model, context, n)) for n in counts]
            if repeat:  # The first round packs weights and warms caches.
                for form, count, elapsed in rounds:
                    seconds[form][count].append(elapsed)
    return {form: dict(by_count) for form, by_count in seconds.items()}


def tree_of(nodes: int, tokens: Sequence[int]) -> DraftTree:
    """Return a root with chains of up to eight nodes, filled with `tokens` repeated."""
    parents = [-1, *(0 if node % 8 == 0 else node for node in range(nodes - 1))]
    return DraftTree.from_rows([([tokens[node % len(tokens)] for node in range(nodes)], parents)])


def _tree_step(model: PreTrainedModel, context: list[int], count: int) -> float:
    runner = ModelRunner(model, 1)
    with runner.active():
        runner.forward(tree_of(1, context[-1:]), [context])
        runner.keep([[]])
        return timed(partial(runner.forward, tree_of(count, context), [[*context, context[0]]]))[1]


def _plain_step(model: PreTrainedModel, context: list[int], count: int) -> float:
    cache = DynamicCache(config=model.config)
    prompt = torch.tensor([context], device=model.device)
    forward = partial(model, use_cache=True, **cache_argument(model.forward, cache))
    forward(prompt)
    return timed(partial(forward, prompt[:, :count]))[1]
