"""Cost of one target forward by number of tree nodes, plain forward and each CPU form, interleaved.

Run as `python -m hf_spec.bench.step_cost --help` says.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from hf_spec.bench.runner import synchronize
from hf_spec.data.machine import environment
from hf_spec.execution.cpu_linear import set_cpu_packing
from hf_spec.execution.runner import ModelRunner
from hf_spec.execution.tree import DraftTree

NODE_COUNTS = (1, 2, 4, 8, 16, 24, 32, 48, 64)


def measure_step_cost(
    model: PreTrainedModel, context: list[int], repeats: int, counts: tuple[int, ...] = NODE_COUNTS
) -> dict[str, dict[int, list[float]]]:
    """Time forwards of trees of different size behind the same context.

    Args:
        model: the target.
        context: token ids before the root.
        repeats: timed rounds; each round runs every form and size once.
        counts: numbers of nodes, root included.

    Returns:
        form -> node count -> seconds of each repetition. Forms: "transformers" runs as many tokens
        behind a `DynamicCache`, as `generate()` and its assisted decoding do; "off" and "auto" are
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


def _tree_step(model: PreTrainedModel, context: list[int], count: int) -> float:
    # A root with chains of up to eight tokens below it.
    parents = [-1, *(0 if node % 8 == 0 else node for node in range(count - 1))]
    tokens = [context[node % len(context)] for node in range(count)]
    tree = DraftTree.from_rows([(tokens, parents)])
    runner = ModelRunner(model, 1)
    with runner.active():
        runner.forward(DraftTree.from_rows([([context[-1]], [-1])]), [context])
        runner.keep([[]])
        sequence = [*context, tokens[0]]
        synchronize()
        start = time.perf_counter()
        runner.forward(tree, [sequence])
        synchronize()
        return time.perf_counter() - start


def _plain_step(model: PreTrainedModel, context: list[int], count: int) -> float:
    cache = DynamicCache(config=model.config)
    prompt = torch.tensor([context], device=model.device)
    model(prompt, past_key_values=cache, use_cache=True)
    tokens = prompt[:, :count]
    synchronize()
    start = time.perf_counter()
    model(tokens, past_key_values=cache, use_cache=True)
    synchronize()
    return time.perf_counter() - start


def table(seconds: dict[str, dict[int, list[float]]]) -> str:
    """Markdown: median milliseconds by node count, and cost relative to one node."""
    counts = sorted(seconds["auto"])
    middle = {form: {n: median(v) * 1e3 for n, v in rows.items()} for form, rows in seconds.items()}
    one, plain = middle["auto"][1], middle["transformers"][1]
    lines = ["| nodes | " + " | ".join(map(str, counts)) + " |", "|---|" + "---|" * len(counts)]
    for form, rows in middle.items():
        cells = [f"{rows[n]:.0f}" if n in rows else "" for n in counts]
        lines.append(f"| {form}, ms | " + " | ".join(cells) + " |")
    for name, unit in (("its own 1 node", one), ("transformers' 1 token", plain)):
        cells = [f"{middle['auto'][n] / unit:.2f}" for n in counts]
        lines.append(f"| auto, relative to {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
