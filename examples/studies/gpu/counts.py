"""Count launches, waits, captures, and copied bytes of a round on a simulated GPU.

Run as `python -m examples.studies.gpu.counts --out counts.json`. No GPU is needed: `tests.fake_gpu`
computes on the CPU and counts the operations of a real device. The models have random weights and a
few layers. Counts of replayed graphs are those of large models; bytes are those of the tiny
vocabulary.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from hf_spec import (
    DraftConfig,
    EagleConfig,
    FalconConfig,
    GemmaAssistantConfig,
    LookupConfig,
    TreeConfig,
)
from hf_spec.backend.device import graph_store
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from tests import tiny_models
from tests.device_rounds import (
    Case,
    Device,
    draft_model,
    eagle_head,
    falcon_head,
    gemma_assistant,
)

NEW_TOKENS = 48


@dataclass(frozen=True)
class Counts:
    """Medians over rounds with a draft in a second call, without its first two rounds.

    Attributes:
        captures: number of graphs captured in the call.
        rounds: number of rounds of the call.
    """

    launches: float
    waits: float
    sends: float
    sent_bytes: float
    fetched_bytes: float
    captures: int
    rounds: int


case = partial(Case, new_tokens=NEW_TOKENS)
TOP_P: list[Any] = [TopKLogitsWarper(20), TopPLogitsWarper(0.9)]
FIVE: dict[str, Any] = {"max_draft_tokens": 5, "length_policy": "static"}
BEAM: dict[str, Any] = {**FIVE, "tree": "dynamic", "width": 4, "max_nodes": 15}
LOOKUP = LookupConfig(max_draft_tokens=5)
CASES = {
    "lookup": case(LOOKUP),
    "lookup, top-p": case(LOOKUP, processors=TOP_P, sampled=True),
    "lookup, temperature": case(
        LOOKUP, processors=[TemperatureLogitsWarper(0.8), *TOP_P], sampled=True
    ),
    "draft of 5": case(DraftConfig(**FIVE), draft_model),
    "draft of 5, top-p": case(DraftConfig(**FIVE), draft_model, processors=TOP_P, sampled=True),
    "draft, default policy": case(DraftConfig(), draft_model, level_cost=0.2),
    "tree": case(TreeConfig(length_policy="static", max_nodes=15), draft_model),
    "falcon": case(FalconConfig(tree=tiny_models.wide_tree()), falcon_head),
    "eagle": case(EagleConfig(**BEAM), eagle_head),
    "gemma_assistant": case(GemmaAssistantConfig(**BEAM), gemma_assistant),
}


def measure(name: str) -> Counts:
    """Return the counts of a second call of a case."""
    graph_store.forget()
    with pytest.MonkeyPatch.context() as patch, Device(CASES[name], patch) as device:
        drafter = device.drafter()
        device.decode(drafter=drafter)
        call = device.decode(drafter=drafter)
    drafted = [one for one in call.rounds[2:] if one.tree.num_nodes > 1]

    def middle(attribute: str) -> float:
        return float(median(getattr(one, attribute) for one in drafted))

    costs = map(middle, ("launches", "waits", "sends", "sent_bytes", "fetched_bytes"))
    return Counts(*costs, captures=call.captures, rounds=len(call.rounds))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; print a table and write the record."""
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
