"""Time tree attention on a GPU by nodes and context against the memory bandwidth; and whole steps.

Run `python -m examples.studies.kernels.tree_attention --help` for the options. For each number of
nodes and context length, one layer attends to one tree with our kernel, PyTorch's SDPA with a mask,
and compiled flex attention. The floor is the time to read keys and values once at the bandwidth of
a copy. With `--model`, whole steps of that model are timed too, with our kernels and with PyTorch
only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
from hf_spec_kernels import RaggedLayout, has_triton, ragged_tree_attention, using
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec.backend.device.capture import cuda_graphs
from hf_spec.backend.device.transfer import send
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.tables import Table
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kernel_layout import ragged_layout, tensors_of, with_tensors
from hf_spec.engine.forward.packing import pack
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.runner import ModelRunner
from hf_spec.evaluation.bench.profiling import tree_of
from hf_spec.evaluation.bench.runner import timed
from hf_spec.evaluation.bench.summary import spread

NODES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 512, 2048, 8192, 32768)
# Largest absolute difference of outputs of magnitude one, from rounding of the dtype.
TOLERANCE = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


@dataclass(frozen=True)
class Heads:
    """Shape of an attention layer; defaults are those of Llama 3.1 8B."""

    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Problem:
    """Inputs of one layer's attention to one tree after a context.

    Attributes:
        query: (N, H, D).
        keys, values: (1, H_kv, context + N, D).
        layout: layout for our kernel.
        visible: (N, context + N) bool mask for the other implementations.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    layout: RaggedLayout
    visible: Tensor

    @property
    def num_bytes(self) -> int:
        """Minimum number of bytes that have to be read and written."""
        tensors = (self.query, self.query, self.keys, self.values)
        return sum(tensor.nelement() * tensor.element_size() for tensor in tensors)


def make_problem(nodes: int, context: int, shape: Heads, device: torch.device) -> Problem:
    """Return random inputs for a tree of `nodes` after `context` committed tokens."""
    tree = tree_of(nodes, [0])
    every = list(range(nodes))
    (segment,) = pack([RowWork(0, context, [], every, every, nodes)], tree).segments
    visible = segment.visible
    if visible is None:
        visible = torch.ones(nodes, context + nodes, dtype=torch.bool)
    layout, dtype = ragged_layout([segment]), getattr(torch, shape.dtype)
    stored = (1, shape.kv_heads, context + nodes, shape.head_size)
    return Problem(
        torch.randn(nodes, shape.heads, shape.head_size, device=device).to(dtype),
        torch.randn(stored, device=device).to(dtype),
        torch.randn(stored, device=device).to(dtype),
        with_tensors(layout, send(tensors_of(layout), device)),
        visible.to(device),
    )


def contenders(problem: Problem, flex: bool) -> dict[str, Callable[[], Tensor]]:
    """Return functions that compute (N, H, D) by name; the first call compiles flex attention."""
    query = problem.query.transpose(0, 1)[None]
    keys, values, visible = problem.keys, problem.values, problem.visible
    found: dict[str, Callable[[], Tensor]] = {
        "kernel": lambda: ragged_tree_attention(
            problem.query, keys, values, problem.layout, impl="triton"
        ),
        "sdpa": lambda: F.scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, enable_gqa=True
        )[0].transpose(0, 1),
    }
    if flex:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        compiled: Any = torch.compile(flex_attention)
        block_mask = create_block_mask(
            lambda batch, head, q, k: visible[q, k],
            B=None,
            H=None,
            Q_LEN=visible.shape[0],
            KV_LEN=visible.shape[1],
            device=str(visible.device),
        )
        found["flex"] = lambda: compiled(
            query, keys, values, block_mask=block_mask, enable_gqa=True
        )[0].transpose(0, 1)
    return found


def check_results(results: dict[str, Tensor], dtype: str) -> None:
    """Check that all results equal those of SDPA.

    Raises:
        AssertionError: with the name of a differing implementation and the difference.
    """
    for name, result in results.items():
        difference = float((result - results["sdpa"]).abs().max())
        assert difference <= TOLERANCE[dtype], f"{name} differs from SDPA by {difference}"


def seconds_of(call: Callable[[], object], repeats: int, device: torch.device) -> list[float]:
    """Return the seconds of each call; GPUs use CUDA events and flushed caches."""
    call()
    if device.type != "cuda":
        return [timed(call)[1] for _ in range(repeats)]
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device=device)
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) * 1e-3 for start, end in events]


def bandwidth(device: torch.device, num_bytes: int = 2**30) -> float:
    """Return the bytes per second that a copy of `num_bytes` reads and writes."""
    source = torch.empty(num_bytes, dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / median(seconds_of(lambda: target.copy_(source), 10, device))


def measure_attention(
    nodes: Sequence[int], contexts: Sequence[int], shape: Heads, repeats: int, device: torch.device
) -> Iterator[dict[str, Any]]:
    """Yield a record per number of nodes and context, with seconds by contender and the floor."""
    fastest = bandwidth(device, 2**30 if device.type == "cuda" else 2**20)
    for context in contexts:
        for count in nodes:
            problem = make_problem(count, context, shape, device)
            calls = contenders(problem, flex=device.type == "cuda")
            check_results({name: call() for name, call in calls.items()}, shape.dtype)
            yield {
                "nodes": count,
                "context": context,
                "bytes": problem.num_bytes,
                "floor_seconds": problem.num_bytes / fastest,
                "seconds": {
                    name: summary(seconds_of(call, repeats, device)) for name, call in calls.items()
                },
            }


def measure_steps(
    model: PreTrainedModel, nodes: Sequence[int], contexts: Sequence[int], repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield a record per number of nodes and context: seconds of a forward pass and `keep`.

    Args:
        model: the target, on its device.
        nodes: tree sizes, including the root.
        contexts: numbers of committed tokens; each repetition adds one.
        repeats: number of timed steps.
    """
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    for context in contexts:
        text = torch.randint(3, vocab, (context,), generator=generator).tolist()
        for count in nodes:
            seconds = {}
            for name, impl in (("kernels", "auto"), ("torch", "torch")):
                with using(impl), cuda_graphs("off"), torch.no_grad():
                    seconds[name] = summary(_steps(model, text, count, repeats))
            yield {"nodes": count, "context": context, "seconds": seconds}


def _steps(model: PreTrainedModel, text: list[int], count: int, repeats: int) -> list[float]:
    runner, sequence, found = ModelRunner(model, 1), list(text), []
    with runner.active():
        # The first step is the prefill; the second compiles and warms up.
        for _ in range(repeats + 2):
            tree = tree_of(count, [sequence[-1], *text])

            def step(tree: DraftTree = tree) -> None:
                runner.forward(tree, [sequence])
                runner.keep([[]])

            found.append(timed(step)[1])
            sequence.append(text[0])
    return found[2:]


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Return the 20th, 50th, and 80th percentile, in seconds."""
    return dict(zip(("p20", "median", "p80"), spread(seconds), strict=True))


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return Markdown with a row per record: microseconds by contender, and the floor if known."""
    names = list(records[0]["seconds"])
    with_floor = ["floor, us"] if "floor_seconds" in records[0] else []
    rows = []
    for record in records:
        seconds = [record["seconds"][name]["median"] for name in names]
        seconds += [record["floor_seconds"]] if with_floor else []
        sizes = str(record["context"]), str(record["nodes"])
        rows.append([*sizes, *(f"{value * 1e6:.1f}" for value in seconds)])
    return Table(["context", "nodes", *(f"{n}, us" for n in names), *with_floor], rows).markdown()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; print tables and write all records as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.kernels.tree_attention", description=__doc__
    )
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--heads", type=int, default=Heads.heads)
    parser.add_argument("--kv-heads", type=int, default=Heads.kv_heads)
    parser.add_argument("--head-size", type=int, default=Heads.head_size)
    parser.add_argument("--dtype", choices=list(TOLERANCE), default=Heads.dtype)
    parser.add_argument("--model", help="folder or Hub id: times its steps as well")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--device", default="cuda", help="cpu only tries the command out")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; kernels are timed on one")
    device = torch.device(options.device)
    shape = Heads(options.heads, options.kv_heads, options.head_size, options.dtype)
    found: dict[str, Any] = {
        "command": "python -m examples.studies.kernels.tree_attention "
        + " ".join(argv or sys.argv[1:]),
        "environment": {**environment(), "triton": version("triton") if has_triton() else None},
        "heads": asdict(shape),
    }
    sizes = options.nodes, options.contexts
    found["attention"] = list(measure_attention(*sizes, shape, options.repeats, device))
    print(table(found["attention"]))
    if options.model:
        dtype = getattr(torch, options.dtype)
        model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval().to(device)
        found["steps"] = list(measure_steps(model, *sizes, options.repeats))
        print(table(found["steps"]))
    if options.out:
        write_json(options.out, found)


if __name__ == "__main__":
    main()
