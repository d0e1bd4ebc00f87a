"""Cost of one target forward by number of tree nodes, plain forward and each CPU form, interleaved.

Run as `python -m hf_spec.bench.step_cost --help` says.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_spec.bench.tables import Table
from hf_spec.bench.timing import timed
from hf_spec.data.machine import environment
from hf_spec.execution.cpu_linear import set_cpu_packing
from hf_spec.execution.runner import ModelRunner
from hf_spec.execution.tree import DraftTree

NODE_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def measure_step_cost(
    model: PreTrainedModel, context: list[int], repeats: int, counts: tuple[int, ...] = NODE_COUNTS
) -> dict[str, dict[int, list[float]]]:
    """Time forwards of trees of different size after the same context.

    Args:
        model: the target.
        context: token ids before the root.
        repeats: timed rounds; each round runs every form and size once.
        counts: numbers of nodes, root included.

    Returns:
        form -> node count -> seconds of each repetition. Forms: "transformers" runs as many tokens
        after a `DynamicCache`, as `generate()` and its assisted decoding do; "off" and "auto" are
        our tree forward without and with packed weights on the CPU (`set_cpu_packing`), where that
        makes a difference: elsewhere "auto" alone.
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
                for form, count, spent in rounds:
                    seconds[form][count].append(spent)
    return {form: dict(by_count) for form, by_count in seconds.items()}


def tree_of(nodes: int, tokens: Sequence[int]) -> DraftTree:
    """A root with chains of up to eight tokens below it.

    Args:
        nodes: how many, the root included.
        tokens: repeated over them, the first is the root's.
    """
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
    model(prompt, past_key_values=cache, use_cache=True)
    return timed(partial(model, prompt[:, :count], past_key_values=cache, use_cache=True))[1]


def table(seconds: dict[str, dict[int, list[float]]]) -> str:
    """Markdown: median milliseconds by node count, and cost relative to one node."""
    counts = sorted(seconds["auto"])
    middle = {form: {n: median(v) * 1e3 for n, v in rows.items()} for form, rows in seconds.items()}
    auto, plain = middle["auto"], middle["transformers"]
    rows = [[f"{form}, ms", *(f"{ms[n]:.0f}" for n in counts)] for form, ms in middle.items()]
    for name, unit in (("its own 1 node", auto[1]), ("transformers' 1 token", plain[1])):
        cells = (f"{auto[n] / unit:.2f}" for n in counts)
        rows.append([f"auto, relative to {name}", *cells])
    return Table(["nodes", *map(str, counts)], rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Command line; prints the table and writes every repetition as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--context", type=int, default=200, help="tokens before the root")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(3, vocab, (options.context,), generator=generator).tolist()
    seconds = measure_step_cost(model, context, options.repeats)
    print(table(seconds))  # noqa: T201 - the command's result
    if options.out:
        facts: dict[str, Any] = {"environment": environment(), "context": options.context}
        options.out.write_text(json.dumps({**facts, "seconds": seconds}, indent=1))


if __name__ == "__main__":
    main()
