"""Tune tile sizes for this machine's GPU, and write them to the folders of the ops.

Run once per kind of GPU as `python -m examples.studies.kernels.tune`; `--help` lists the
options. For each op and shape key, every candidate is timed on one typical call, and the fastest is
kept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from hf_spec_kernels import distill_loss, draft_features, ragged_tree_attention, verify_tree
from hf_spec_kernels.configs import config_file, device_name, trying
from hf_spec_kernels.ragged_tree_attention import RaggedLayout

Call = Callable[[], object]
# Returns the seconds of a call.
Timer = Callable[[Call], float]

VOCAB = 128_256
CONTEXT = 8192
NODES = {"few": 4, "some": 16, "many": 512}
KV_HEADS, GROUPS = 8, 4

TF32_ROWS = 64

_OVER_VOCABULARY = {"BLOCK_V": (1024, 2048, 4096, 8192, 16384), "num_warps": (4, 8, 16)}
CANDIDATES: dict[str, dict[str, tuple[int, ...]]] = {
    "ragged_tree_attention": {
        "BLOCK_M": (16, 32, 64),
        "BLOCK_N": (16, 32, 64, 128),
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3),
        "min_split": (64, 128, 256),
    },
    "verify_tree": _OVER_VOCABULARY,
    "draft_features": _OVER_VOCABULARY,
    "distill_loss": _OVER_VOCABULARY,
}


def attention_call(key: str, device: torch.device, context: int = CONTEXT) -> Call:
    """Return attention of one row's decoding step: nodes of a tree after a context.

    Args:
        key: shape key such as `head128_16bit_few`.
        device: device to run on.
        context: number of committed tokens.
    """
    head, bits, rows = key.split("_")
    dtype = _dtype(bits)
    # 4 nodes have the rows of one tile; see `kernel.config_key`.
    nodes = NODES[rows]
    size, entries = int(head.removeprefix("head")), context + nodes
    query = torch.randn(nodes, KV_HEADS * GROUPS, size, device=device).to(dtype)
    keys = torch.randn(1, KV_HEADS, entries, size, device=device).to(dtype)

    def ints(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    layout = RaggedLayout(
        slot=ints(0),
        query_start=ints(0, nodes),
        num_keys=ints(entries),
        prefix=ints(context),
        bits=torch.full((nodes, -(-nodes // 8)), 255, dtype=torch.uint8, device=device),
        position=torch.arange(context, entries, dtype=torch.int32, device=device),
        first_position=ints(0),
        key_position=torch.arange(context, entries, dtype=torch.int32, device=device),
        key_start=ints(0),
        max_queries=nodes,
        max_keys=entries,
    )
    return lambda: ragged_tree_attention(query, keys, keys, layout, impl="triton")


def vocabulary_call(
    op: str, key: str, device: torch.device, vocab: int = VOCAB, rows: int = 64
) -> Call:
    """Return a typical call of an op over the vocabulary.

    Args:
        op: name of the op.
        key: `16bit` or `32bit`.
        device: device to run on.
        vocab: size of the vocabulary.
        rows: number of distributions.
    """
    logits = torch.randn(rows, vocab, device=device).to(_dtype(key))
    if op == "draft_features":
        probs = logits.softmax(dim=-1)
        return lambda: draft_features(probs, impl="triton")
    nodes = torch.arange(rows, device=device) % vocab
    if op == "verify_tree":
        ends = torch.tensor([0, rows], device=device)
        return lambda: verify_tree(logits, nodes, nodes - 1, ends, rows, impl="triton")
    logits.requires_grad_()
    return lambda: distill_loss(logits, logits.detach(), nodes, impl="triton").backward()


def tune(op: str, key: str, call: Call, timer: Timer) -> dict[str, int]:
    """Return the fastest candidate that runs.

    Args:
        op: name of the op.
        key: shape key, which is printed.
        call: function that launches the op.
        timer: function that returns the seconds of a call.

    Raises:
        RuntimeError: if no candidate runs.
    """
    best, shortest = None, float("inf")
    for candidate in _candidates(op, key):
        with trying(op, candidate):
            try:
                seconds = timer(call)
            except _too_large():
                continue
        if seconds < shortest:
            best, shortest = candidate, seconds
    if best is None:
        raise RuntimeError(f"no tile sizes of {op} for {key} fit this GPU")
    print(f"{op} {key}: {best}, {shortest * 1e6:.1f} us", file=sys.stderr)
    return best


def write(file: Path, found: dict[str, dict[str, int]]) -> None:
    """Write the configs of one op, one line per shape key."""
    lines = (f' "{key}": {json.dumps(arguments)}' for key, arguments in found.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.kernels.tune", description=__doc__
    )
    parser.add_argument("--op", action="append", choices=list(CANDIDATES), help="all by default")
    parser.add_argument("--key", action="append", help="shape keys; all by default")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("tile sizes are found by timing on a GPU, and there is none here")
    device = torch.device("cuda", torch.cuda.current_device())
    for op in options.op or CANDIDATES:
        keys = json.loads(config_file(op, "default").read_text(encoding="utf-8"))
        target = config_file(op, device_name(device))
        known = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else {}
        for key in keys:
            if options.key is None or key in options.key:
                attention = op == "ragged_tree_attention"
                call = (
                    attention_call(key, device) if attention else vocabulary_call(op, key, device)
                )
                known[key] = tune(op, key, call, _gpu_seconds)
                write(target, known)


def _candidates(op: str, key: str) -> Iterator[dict[str, int]]:
    choices = CANDIDATES[op]
    for values in itertools.product(*choices.values()):
        found = dict(zip(choices, values, strict=True))
        # From this tile size on, compute capability 10.0 runs float32 matmuls in TF32.
        if "32bit" not in key or found.get("BLOCK_M", 0) < TF32_ROWS:
            yield found


def _dtype(bits: str) -> torch.dtype:
    return {"16bit": torch.bfloat16, "32bit": torch.float32}[bits]


def _gpu_seconds(call: Call) -> float:
    """Return the median seconds of repeated calls, with caches flushed in between."""
    from triton.testing import do_bench

    return float(do_bench(call, return_mode="median")) * 1e-3


def _too_large() -> type[Exception]:
    from triton.runtime.errors import OutOfResources

    return OutOfResources  # type: ignore[no-any-return]


if __name__ == "__main__":
    main()
