"""Launches, waits, captures, and copied bytes of a round, counted on a pretended GPU.

Run as `python -m examples.studies.gpu.counts --out counts.json`. No GPU is needed: `tests.fake_gpu`
computes on the CPU and counts what a real device would be asked. The models have random weights and
a few layers, so counts of replayed graphs are those of large models; bytes are those of the tiny
vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from transformers import (
    MaxLengthCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import hf_spec
from hf_spec.backend.device import graph_store
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.drafting.cost_model.cost_curves import Costs
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.loop import finish_step
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.registry import make_drafter
from tests import tiny_models
from tests.fake_gpu import FakeGpu, OnGpu, on_gpu, pretended, recording

NEW_TOKENS = 48


@dataclass(frozen=True)
class Case:
    """A way to decode.

    Attributes:
        config: the strategy.
        assistant: makes the draft model or head, on the CPU.
        sampled: draw tokens, with top-k and top-p.
        temperature: of these draws, before top-k and top-p.
        model: name of the tiny target.
        level_cost: time of a drafted level in steps of the target, for the default length policy:
            times of a pretended device are not those of a real one.
    """

    config: Any
    assistant: Callable[[], Any] = lambda: None
    sampled: bool = False
    temperature: float | None = None
    model: str = "llama"
    level_cost: float | None = None


@dataclass(frozen=True)
class Counts:
    """Medians over the rounds of a second call that verify a draft, after its first two.

    Attributes:
        captures: graphs captured in the call.
        rounds: rounds of the call.
    """

    launches: float
    waits: float
    sends: float
    sent_bytes: float
    fetched_bytes: float
    captures: int
    rounds: int


def draft_model() -> Any:
    """The tiny draft model of the tests."""
    return tiny_models.draft_model("llama")


def falcon_head() -> Any:
    """A Falcon head of random weights."""
    from tests.falcon_reference import random_head

    return random_head("llama")


def eagle_head() -> Any:
    """An EAGLE-3 head of random weights."""
    from hf_spec.adapters.published import read_published
    from hf_spec.methods.eagle.head import build
    from tests.published_heads import sample

    found = read_published(sample("eagle3").folder)
    assert found is not None
    return build(found, tiny_models.build("llama"))


def gemma_assistant() -> Any:
    """A Gemma assistant of random weights."""
    from tests.gemma_reference import random_assistant

    return random_assistant("llama")


FIVE: dict[str, Any] = {"max_draft_tokens": 5, "length_policy": "static"}
BEAM: dict[str, Any] = {**FIVE, "tree": "dynamic", "width": 4, "max_nodes": 15}
CASES = {
    "lookup": Case(hf_spec.LookupConfig(max_draft_tokens=5)),
    "lookup, top-p": Case(hf_spec.LookupConfig(max_draft_tokens=5), sampled=True),
    "lookup, temperature": Case(
        hf_spec.LookupConfig(max_draft_tokens=5), sampled=True, temperature=0.8
    ),
    "draft of 5": Case(hf_spec.DraftConfig(**FIVE), draft_model),
    "draft of 5, top-p": Case(hf_spec.DraftConfig(**FIVE), draft_model, sampled=True),
    "draft, default policy": Case(hf_spec.DraftConfig(), draft_model, level_cost=0.2),
    "tree": Case(hf_spec.TreeConfig(length_policy="static", max_nodes=15), draft_model),
    "falcon": Case(hf_spec.FalconConfig(tree=tiny_models.wide_tree()), falcon_head),
    "eagle": Case(hf_spec.EagleConfig(**BEAM), eagle_head),
    "gemma_assistant": Case(hf_spec.GemmaAssistantConfig(**BEAM), gemma_assistant),
}


@torch.no_grad()
def decode(case: Case, model: Any, drafter: Drafter, gpu: FakeGpu) -> Counts:
    """Decode one sequence and count."""
    torch.manual_seed(0)
    prompt = tiny_models.settled_prompt(case.model)
    ids, mask = OnGpu(prompt), OnGpu(torch.ones_like(prompt))
    length = prompt.shape[1] + NEW_TOKENS
    processors: list[Any] = []
    if case.temperature is not None:
        processors.append(TemperatureLogitsWarper(case.temperature))
    if case.sampled:
        processors += [TopKLogitsWarper(20), TopPLogitsWarper(0.9)]
    stop = StopRules([MaxLengthCriteria(length)], 1)
    options: dict[str, Any] = {"processors": processors, "do_sample": case.sampled}
    state = GenerationState.create(ids, mask, stop, expected_length=length, **options)
    target = ModelRunner(model, 1, drafter.hidden_layers)
    target.expected_length = length
    found: list[tuple[int, int, int, int, int]] = []
    rounds = 0
    with target.active(), drafter.active(state):
        verifier = drafter.make_verifier(processors, 1)
        while state.unfinished:
            gpu.restart()
            tree = drafter.draft(state, state.draft_limits)
            readout = verifier.readout(tree, state)
            output = target.forward(tree, state.tokens, readout=readout)
            finish_step(target, drafter, verifier, state, tree, output)
            rounds += 1
            if rounds > 2 and tree.num_nodes > 1:
                # A fetch ends with the host waiting for its copy.
                waits = sum(gpu.waits.values()) + gpu.fetches
                found.append((gpu.launches, waits, gpu.sends, gpu.sent_bytes, gpu.fetched_bytes))
        captures = target.graph_counts[1]
        source = getattr(drafter, "_main", None)
        for runner in vars(drafter if source is None else source.drafter).values():
            graphs = getattr(runner, "_graphs", None)
            captures += graphs.captures if graphs is not None else 0
    launches, waited, sends, sent, fetched = (float(median(c)) for c in zip(*found, strict=True))
    return Counts(launches, waited, sends, sent, fetched, captures, rounds)


def measure(name: str) -> Counts:
    """Count the rounds of a second call of the case."""
    case = CASES[name]
    graph_store.forget()
    assistant = case.assistant()
    tiny_models.settled_prompt(case.model)
    with pytest.MonkeyPatch.context() as patch, pretended(patch) as gpu, recording(patch, gpu):
        model = on_gpu(tiny_models.build(case.model))
        moved = None if assistant is None else on_gpu(assistant)
        drafter: Any = make_drafter(case.config, model, moved)
        if case.level_cost is not None:
            drafter._configured_costs = Costs(
                lambda nodes: 1.0 + 0.02 * nodes,
                {case.config.strategy: lambda depth: case.level_cost * depth},
            )
        decode(case, model, drafter, gpu)
        return decode(case, model, drafter, gpu)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; prints a table and writes the record."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.gpu.counts", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    options = parser.parse_args(argv)
    cases = {}
    for name in options.case or CASES:
        cases[name] = asdict(measure(name))
        print(f"{name:24}", *(f"{key} {value:g}" for key, value in cases[name].items()), sep="  ")
    write_json(options.out, {"environment": environment(), "cases": cases})


if __name__ == "__main__":
    main()
