"""Measure the host time of the parts of a captured round.

Run as `python -m examples.studies.gpu.host_work --out host_work.json` on an otherwise idle machine.
No GPU is needed: replays do nothing, so only Python is timed. A GPU would be idle during the parts
between the verdict of a round and the next replay. Streaming runs after that replay is launched, as
it does with a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MaxLengthCriteria, TextStreamer

from examples.studies.gpu.counts import CASES
from hf_spec.backend.device import graph_store
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.engine.decode import generation_state, verifiers
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.loop import speculative_step
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.fast import cuda_graphs, graph_shapes
from hf_spec.engine.forward import step as packed_step
from hf_spec.engine.forward.row_storage import RowStorage
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.lookup.drafter import LookupDrafter
from hf_spec.methods.registry import make_drafter
from tests import tiny_models

NEW_TOKENS = 160
# Parts in the order of a round: the module or class of each, and the attribute name.
PARTS: dict[str, tuple[Any, str]] = {
    "lookup": (LookupDrafter, "draft"),
    "tokens of the rows": (RowStorage, "plan"),
    "segments": (RowStorage, "pack"),
    "layout": (packed_step, "ragged_layout"),
    "slot mapping": (packed_step, "segment_slot_mapping"),
    "choice of the graph": (cuda_graphs.StepGraphs, "_fitting"),
    "static inputs": (graph_shapes.Shape, "fill"),
    "rest of the forward pass": (ModelRunner, "forward"),
    "replay": (graph_shapes, "Shape"),
    "verify_tree": (verifiers, "verify_tree"),
    "rest of the verification": (verifiers.NodeDraw, "verify"),
    "stop rules": (GenerationState, "commit"),
    "streaming": (GenerationState, "_stream"),
    "kept keys and values": (ModelRunner, "keep"),
    "observed acceptance": (LookupDrafter, "observe"),
}
# Parts that run on the device.
DEVICE = ("replay", "verify_tree")


class HostTimes:
    """Exclusive microseconds of each part, without the parts that it calls."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []
        self._inner = [0.0]

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time of the block to a part of the round."""
        self._inner.append(0.0)
        start = time.perf_counter()
        yield
        took = time.perf_counter() - start
        self.rounds[-1][name] += 1e6 * (took - self._inner.pop())
        self._inner[-1] += took

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `run` so that its time is added to a part."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return run(*args, **kwargs)

        return timed


@contextmanager
def replays_of_nothing(times: HostTimes) -> Iterator[None]:
    """Enable graph capture on the CPU; a replay returns the outputs of the capture."""

    def record(shape: Any, compute: Any, pool: Any, memory: Any) -> None:
        shape.outputs = compute(shape, pool)
        shape.graph = SimpleNamespace(replay=times.timed("replay", lambda: None))

    graph_store.forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_graphs, "DEVICES", {"cpu"})
        patch.setattr(cuda_graphs, "serves", lambda _: True)
        patch.setattr(cuda_graphs, "NoWaits", lambda _: nullcontext())
        patch.setattr(torch.cuda, "graph_pool_handle", object)
        patch.setattr(graph_shapes.Shape, "record", record)
        patch.setattr(verifiers, "serves", lambda _: True)
        asynchronous = SimpleNamespace(ASYNCHRONOUS={"cpu"})
        patch.setattr(generation_state, "transfer", asynchronous, raising=False)
        for name, (owner, attribute) in PARTS.items():
            if name != "replay":
                patch.setattr(owner, attribute, times.timed(name, getattr(owner, attribute)))
        yield
    graph_store.forget()


@torch.no_grad()
def measure(rows: int, streams: bool) -> dict[str, float]:
    """Return the median microseconds of each part in replayed rounds of lookup."""
    times = HostTimes()
    prompt = tiny_models.settled_prompt("llama").expand(rows, -1)
    length = prompt.shape[1] + NEW_TOKENS
    stop = StopRules([MaxLengthCriteria(length)], rows)
    streamer = TextStreamer(tiny_models.tokenizer()) if streams else None
    options: dict[str, Any] = {"expected_length": length, "streamer": streamer}
    state = GenerationState.create(prompt, torch.ones_like(prompt), stop, **options)
    model = tiny_models.build("llama")
    with replays_of_nothing(times):
        drafter = make_drafter(CASES["lookup"].config, model, None)
        target = ModelRunner(model, rows, drafter.hidden_layers)
        target.expected_length = length
        with target.active(), drafter.active(state):
            verifier = drafter.make_verifier([], rows)
            while state.unfinished:
                times.rounds.append(defaultdict(float))
                speculative_step(target, drafter, verifier, state)
    rounds = [round_ for round_ in times.rounds if "replay" in round_]
    return {name: median(round_[name] for round_ in rounds) for name in PARTS if name not in DEVICE}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; print a table and write the record."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.gpu.host_work", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    cases = {f"batch {rows}": measure(rows, streams=rows == 1) for rows in (1, 8)}
    for name in next(iter(cases.values())):
        print(f"{name:28}", *(f"{parts[name]:8.1f}" for parts in cases.values()))
    write_json(options.out, {"environment": environment(), "cases": cases})


if __name__ == "__main__":
    main()
