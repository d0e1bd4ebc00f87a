"""Time whole target steps by rows and nodes: eager, and as replayed CUDA graphs.

Run `python -m examples.studies.kernels.step_time --help` for the options. A step is a forward pass
over the trees of all rows, verification, and keeping the accepted tokens; the host waits for it, as
in a generation. Both forms alternate on the same text, and their logits are compared. A CPU has no
CUDA graphs: there, the second form is the padded step, which only serves to try the command out.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from hf_spec_kernels import has_triton
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.studies.kernels.tree_attention import summary
from hf_spec.backend.device.capture import cuda_graphs, padded_steps
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.tables import Table
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.verifiers import NodeDraw
from hf_spec.engine.fast.cuda_graphs import WARM_UPS
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from hf_spec.evaluation.bench.runner import timed

ROWS = (1, 4, 16)
NODES = (1, 4, 8, 16, 32)
# Largest difference between logits, relative to the largest one.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}


class Steps:
    """Steps of one model on fixed rows, in one form.

    Args:
        model: the target, on its device.
        texts: committed tokens of each row.
        nodes: number of nodes of each row's chain, including the root.
        clock: clock that returns seconds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        texts: Sequence[Sequence[int]],
        nodes: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._clock = clock
        self.runner = ModelRunner(model, len(texts))
        self._texts = [list(text) for text in texts]
        self._nodes = nodes
        ids = torch.tensor(self._texts, device=model.device)
        stop = StopRules([], len(texts))
        self._state = GenerationState.create(ids, torch.ones_like(ids), stop)
        self._verifier = NodeDraw([], len(texts))

    def run(self) -> tuple[float, Tensor]:
        """Return the seconds of the next step and its (N, V) logits; add one token to every row."""
        parents = list(range(-1, self._nodes - 1))
        tree = DraftTree.from_rows(
            [([text[-1], *text[: self._nodes - 1]], parents) for text in self._texts]
        )

        def step() -> Tensor:
            logits = self.runner.forward(tree, self._texts).logits
            self._verifier.verify(tree, logits, self._state)
            # No draft token is accepted, so both forms continue with the same text.
            self.runner.keep([[] for _ in self._texts])
            return logits

        logits, seconds = timed(step, self._clock)
        for text in self._texts:
            text.append(text[len(text) % 7])
        return seconds, logits.clone()


def time_steps(
    model: PreTrainedModel,
    rows: Sequence[int],
    nodes: Sequence[int],
    context: int,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Yield a record per number of rows and nodes, with the seconds of both forms.

    Args:
        model: the target, on its device.
        rows: batch sizes.
        nodes: tree sizes per row, including the root.
        context: number of committed tokens before the first step.
        repeats: number of timed steps.
    """
    second = "captured" if model.device.type == "cuda" else "padded"
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    for num_rows in rows:
        texts = torch.randint(3, vocab, (num_rows, context), generator=generator).tolist()
        for count in nodes:
            seconds: dict[str, list[float]] = {"eager": [], second: []}
            with torch.no_grad(), ExitStack() as stack:
                forms = {name: Steps(model, texts, count) for name in seconds}
                with cuda_graphs("off"):
                    stack.enter_context(forms["eager"].runner.active())
                with cuda_graphs("auto"), padded_steps():
                    stack.enter_context(forms[second].runner.active())
                # Untimed: the prefill, the warm-up steps of a graph, and its capture.
                for step in range(WARM_UPS + 2 + repeats):
                    found = {name: form.run() for name, form in forms.items()}
                    check(found["eager"][1], found[second][1])
                    if step >= WARM_UPS + 2:
                        for name, (spent, _) in found.items():
                            seconds[name].append(spent)
            yield {
                "rows": num_rows,
                "nodes": count,
                "context": context,
                "seconds": {name: summary(found) for name, found in seconds.items()},
            }


def check(expected: Tensor, found: Tensor) -> None:
    """Check that both forms compute the same.

    Raises:
        AssertionError: if logits differ by more than rounding.
    """
    allowed = TOLERANCE[str(expected.dtype).removeprefix("torch.")] * float(expected.abs().max())
    difference = float((expected - found).abs().max())
    assert difference <= allowed, f"logits differ by {difference}, more than {allowed}"


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return Markdown with a row per record: milliseconds of both forms, and their ratio."""
    eager, other = records[0]["seconds"]
    rows = []
    for record in records:
        first, second = (record["seconds"][name]["median"] * 1e3 for name in (eager, other))
        figures = (f"{value:.2f}" for value in (first, second, first / second))
        rows.append([str(record["rows"]), str(record["nodes"]), *figures])
    return Table(["rows", "nodes", f"{eager}, ms", f"{other}, ms", "ratio"], rows).markdown()


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; print a table and write all records as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.kernels.step_time", description=__doc__
    )
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES, help="per row")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--device", default="cuda", help="cpu only tries the command out")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no GPU here; graphs are recorded on one")
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype)
    model = model.eval().to(options.device)
    sizes = options.rows, options.nodes, options.context
    records = list(time_steps(model, *sizes, options.repeats))
    print(table(records))
    if options.out:
        found = {
            "command": "python -m examples.studies.kernels.step_time "
            + " ".join(argv or sys.argv[1:]),
            "environment": {**environment(), "triton": version("triton") if has_triton() else None},
            "steps": records,
        }
        write_json(options.out, found)


if __name__ == "__main__":
    main()
