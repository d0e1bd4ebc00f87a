"""Cost of a target forward pass by number of tree nodes, in transformers and in our engine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial

import torch
from transformers import DynamicCache, PreTrainedModel

from hf_spec.backend.cpu.packed_weights import set_cpu_packing
from hf_spec.common.compat import cache_argument
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from hf_spec.evaluation.bench.runner import timed

NODE_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


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
