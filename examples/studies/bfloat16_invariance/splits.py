"""Check that a model's states are bitwise equal however a text is split into forward passes.

Every split of a text is compared with the text one token at a time: embeddings, the states after
every layer, and the logits. Run `python -m examples.studies.bfloat16_invariance.splits --help` for
the options.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hf_spec
from examples.studies.models import load_model
from hf_spec.common.machine import environment
from hf_spec.common.prompts import load_prompts
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner

CHUNKS = (2, 3, 4, 7, 8, 12, 13, 16, 17, 32, 33, 48, 64, 65, 100, 128)
# Path tokens per forward pass, and siblings of each.
TREES = ((4, 1), (4, 3), (8, 1), (16, 3))


@dataclass
class States:
    """Results of one split.

    Attributes:
        hidden: states of all tokens, per index into `hidden_states`.
        logits: logits by position; only of nodes, not of pending tokens.
    """

    hidden: list[Tensor]
    logits: dict[int, Tensor]


def run_chunks(
    model: Any, rows: Sequence[Sequence[int]], size: int, siblings: int = 0
) -> list[States]:
    """Run texts of equal length as draft trees with a path of `size` tokens.

    Args:
        model: a causal language model.
        rows: the texts, one per row of the batch.
        size: tokens of the text per forward pass; 0 runs all but the last as pending tokens.
        siblings: additional siblings of each path node, which are dropped afterwards.
    """
    length, depth = len(rows[0]), model.config.num_hidden_layers
    runner = ModelRunner(model, len(rows), hidden_layers=range(depth + 1))
    hidden: list[list[list[Tensor]]] = [[[] for _ in range(depth + 1)] for _ in rows]
    logits: list[dict[int, Tensor]] = [{} for _ in rows]
    starts = range(0, length, size) if size else [length - 1]
    with torch.no_grad(), runner.active():
        for start in starts:
            end = min(start + (size or 1), length)
            tokens, parents, path = _branched(rows, start, end, siblings)
            tree = DraftTree.from_rows([(row, parents) for row in tokens])
            output = runner.forward(tree, [row[: start + 1] for row in rows])
            for row in range(len(rows)):
                base = row * len(parents)
                places = [output.nodes[base + node] for node in path]
                ran = [*output.pending.get(row, []), *places]
                for layer, states in output.hidden.items():
                    hidden[row][layer].append(states[ran])
                for offset, node in enumerate(path):
                    logits[row][start + offset] = output.logits[base + node]
            runner.keep([path[1:]] * len(rows))
    return [
        States([torch.cat(parts) for parts in hidden[row]], logits[row]) for row in range(len(rows))
    ]


def _branched(
    rows: Sequence[Sequence[int]], start: int, end: int, siblings: int
) -> tuple[list[list[int]], list[int], list[int]]:
    """Return the tokens of every row, the shared parents, and the nodes of the path."""
    tokens = [[row[start]] for row in rows]
    parents, path = [-1], [0]
    for place in range(start + 1, end):
        above = path[-1]
        for other in range(siblings):
            for mine, row in zip(tokens, rows, strict=True):
                mine.append(row[(place + 1 + other) % len(row)])
            parents.append(above)
        path.append(len(parents))
        for mine, row in zip(tokens, rows, strict=True):
            mine.append(row[place])
        parents.append(above)
    return tokens, parents, path


def first_difference(found: States, expected: States) -> dict[str, Any] | None:
    """Return the first layer with differing states and the number of tokens; None if equal."""
    for layer, (one, other) in enumerate(zip(found.hidden, expected.hidden, strict=True)):
        differing = (one != other).any(dim=-1)
        if differing.any():
            return {"states": layer, "tokens": int(differing.sum()), "of": len(one)}
    places = [p for p, one in found.logits.items() if not torch.equal(one, expected.logits[p])]
    return {"states": "logits", "tokens": len(places)} if places else None


def compare_splits(
    model: Any,
    texts: Sequence[Sequence[int]],
    chunks: Sequence[int] = CHUNKS,
    trees: Sequence[tuple[int, int]] = TREES,
) -> list[dict[str, Any]]:
    """Compare splits of texts of equal length with one token at a time.

    Args:
        model: a causal language model.
        texts: the first one also runs alone; all run together as rows of a batch.
        chunks: tokens per forward pass.
        trees: path tokens per forward pass, and siblings of each.

    Returns:
        One row per split: its name and its first difference.
    """
    expected = [run_chunks(model, [text], 1)[0] for text in texts]
    splits: list[tuple[str, list[States]]] = []
    for size in chunks:
        splits.append((f"chunks of {size}", run_chunks(model, texts[:1], size)))
    splits.append(("all at once", run_chunks(model, texts[:1], 0)))
    for size, siblings in trees:
        name = f"paths of {size} with {siblings} siblings"
        splits.append((name, run_chunks(model, texts[:1], size, siblings)))
    for size in (0, 1, 8):
        splits.append((f"{len(texts)} rows, chunks of {size}", run_chunks(model, texts, size)))
    rows = []
    for name, found in splits:
        differs = [first_difference(*pair) for pair in zip(found, expected, strict=False)]
        rows.append({"split": name, "differs": next((one for one in differs if one), None)})
    return rows


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run the block with `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0 only if no split changes a bit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=200, help="length of each text")
    parser.add_argument("--rows", type=int, default=3, help="texts in a batch")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    dtype = getattr(torch, options.dtype)
    model, tokenizer = load_model(options.model, dtype)
    ids = [i for p in load_prompts(per_task=2) for i in p.encode(tokenizer)[0].tolist()]
    size = options.tokens
    texts = [ids[row * size : (row + 1) * size] for row in range(options.rows)]
    records = []
    for mode in ("off", "on"):
        hf_spec.compile(model, mode)
        for threads in options.threads:
            with num_threads(threads):
                if mode == "on":
                    # First calls compile the layers and check them against the uncompiled ones.
                    run_chunks(model, [texts[0][:4]], 1)
                    run_chunks(model, [texts[0][:40]], 8)
                rows = compare_splits(model, texts)
            for row in rows:
                print(mode, threads, row["split"], row["differs"] or "same", flush=True)
            records.append({"compiled": mode == "on", "threads": threads, "splits": rows})
    if options.out:
        facts = {"environment": environment(), "dtype": options.dtype, "tokens": size}
        options.out.write_text(json.dumps({**facts, "runs": records}, indent=1) + "\n")
    return int(any(row["differs"] for record in records for row in record["splits"]))


if __name__ == "__main__":
    sys.exit(main())
