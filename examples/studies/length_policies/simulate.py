"""Replay the cost model over recorded answers on simulated machines.

Run `python -m examples.studies.length_policies.simulate --help` for the options. The classes of
hf_spec make every decision, with default options. The draft model, the target, and the clock are
simulated: the draft model proposes the tokens recorded by `traces.py`, and the target produces the
recorded answer. A step of the target takes 1, and each further node `node_cost`. A draft token
takes `draft_cost`, and reading a token `read_cost` of that. The drafter measures times with noise
and outliers; the reported times are those without.

After the first wrong token, a draft continues with the proposals of the following positions, since
the draft model's own continuation of a wrong text was not recorded.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import MaxLengthCriteria

from examples.studies.length_policies.traces import SCALE
from hf_spec import AutoConfig, DraftConfig, LookupConfig, TreeConfig
from hf_spec.backend.device.clock import Clock
from hf_spec.common.files import write_json
from hf_spec.common.tables import Table
from hf_spec.drafting.cost_model import cost_model_drafter
from hf_spec.drafting.cost_model.adaptive_length_drafter import adapt_length
from hf_spec.drafting.cost_model.cost_curves import RoundTimes
from hf_spec.drafting.cost_model.cost_model_drafter import Bounds, CostModelDrafter
from hf_spec.drafting.cost_model.draft_source import NODES_PER_LEVEL, DraftSource
from hf_spec.drafting.length_policy import make_policy
from hf_spec.drafting.level_drafter import LevelDrafter
from hf_spec.drafting.tree_growth import Growth, NextTokens
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.methods.draft_model.loading import tree_for_auto
from hf_spec.methods.lookup.drafter import lookup_sources
from hf_spec.methods.registry import make_drafter

DRAFT_COSTS = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5)
NODE_COSTS = (0.005, 0.02, 0.08)
FIXED_LENGTHS = range(17)
STRATEGIES = ("draft", "tree", "lookup", "auto")


@dataclass(frozen=True)
class Machine:
    """Costs in steps of the target, and the noise of measured times.

    Attributes:
        read_cost: cost of reading one new token, in draft tokens.
        noise: standard deviation of the logarithm of a measured time.
        outlier_share, outlier_factor: this share of measured times is longer by the factor.
    """

    draft_cost: float
    node_cost: float
    read_cost: float = 0.05
    noise: float = 0.05
    outlier_share: float = 0.01
    outlier_factor: float = 5.0

    def draft_seconds(self, level: int, unread: int) -> float:
        """Return the time of a draft token; the first one of a draft reads `unread` tokens."""
        return self.draft_cost * (1 + (self.read_cost * (unread - 1) if level == 0 else 0.0))

    def verify_seconds(self, drafted: int) -> float:
        """Return the time of a forward pass over the root and `drafted` nodes."""
        return 1.0 + self.node_cost * drafted


@dataclass(frozen=True)
class Answer:
    """A recorded answer with the proposals of one draft model; see `traces.py`."""

    task: str
    prompt: list[int]
    tokens: list[int]
    proposals: list[list[int]]

    def run_length(self, position: int) -> int:
        """Return the number of correct tokens of a draft at `position`."""
        length = 0
        for proposal, token in zip(self.proposals[position:], self.tokens[position:], strict=True):
            if proposal[:1] != [token]:
                break
            length += 1
        return length


class Simulation(Clock):
    """Clock of a simulated machine: `now` is the measured time, `spent` the time without noise."""

    def __init__(self, machine: Machine, seed: int = 0):
        self.machine = machine
        self.now = self.spent = 0.0
        self._random = random.Random(seed)  # noqa: S311 - no secret

    def mark(self) -> float:
        """See `Clock`."""
        return self.now

    def run(self, seconds: float) -> None:
        """Advance the clock, with noise in `now`."""
        self.spent += seconds
        factor = self._random.lognormvariate(0.0, self.machine.noise)
        if self._random.random() < self.machine.outlier_share:
            factor *= self.machine.outlier_factor
        self.now += seconds * factor


class TraceDrafter(LevelDrafter):
    """Drafter that proposes the recorded tokens and advances the clock like a draft model."""

    forwards = 0  # type: ignore[assignment]

    def __init__(self, config: Any, policy: Any, simulation: Simulation, answer: Answer):
        super().__init__(config, policy)
        self.simulation, self.answer, self._read = simulation, answer, 0

    def relative_cost(self, target: Any) -> float:
        """Return the cost estimated from model sizes, which is 20% too low here."""
        return 0.8 * self.simulation.machine.draft_cost

    def next_tokens(self, state: GenerationState, growth: Growth) -> NextTokens:
        """Return the recorded tokens; all nodes of a level have the same ones."""
        unread = len(state.tokens[0]) - self._read
        self.simulation.run(self.simulation.machine.draft_seconds(growth.depth, unread))
        self._read = len(state.tokens[0])
        self.forwards += 1
        position = min(state.generated[0] + growth.depth, len(self.answer.tokens) - 1)
        proposal = self.answer.proposals[position][: 2 * self.shape.num_ranks]
        tokens = torch.tensor(proposal[::2]).expand(len(growth.owners), 1, -1)
        chances = torch.tensor(proposal[1::2], dtype=torch.float32) / SCALE
        return NextTokens(tokens, chances.expand(len(growth.owners), 1, -1))

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Do nothing: no KV cache is kept."""


def tiny_target() -> LlamaForCausalLM:
    """Return a model that measured costs are cached for; it never runs."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=8, num_hidden_layers=1, **sizes))


TARGET = tiny_target()


def make(strategy: str, simulation: Simulation, answer: Answer) -> Drafter:
    """Return a strategy under the cost model, with a simulated draft model if it has one."""
    if strategy == "lookup":
        return make_drafter(LookupConfig(), TARGET, None)
    config = (DraftConfig() if strategy == "draft" else TreeConfig()).resolve(measures=True)
    if strategy == "auto":
        config = tree_for_auto(AutoConfig()).resolve(measures=True)
    policy = make_policy(config, TARGET)
    inner = TraceDrafter(config, policy, simulation, answer)
    if strategy != "auto":
        width = min(config.shape.children, NODES_PER_LEVEL)
        return adapt_length(inner, TARGET, config, width)
    options = AutoConfig()
    free = lookup_sources(LookupConfig(), options.max_draft_tokens)
    assistants = [DraftSource("tree", inner, options.max_draft_tokens)]
    bounds = Bounds(options.max_draft_tokens, options.max_nodes)
    return CostModelDrafter(free, assistants, TARGET, "auto", bounds)


def generate(drafter: Drafter, simulation: Simulation, answer: Answer) -> dict[str, Any]:
    """Generate one answer; return its time without the forward pass of the prompt."""
    ids = torch.tensor([answer.prompt])
    longest = len(answer.prompt) + len(answer.tokens)
    state = GenerationState.create(
        ids, torch.ones_like(ids), StopRules([MaxLengthCriteria(longest)], 1)
    )
    start, rounds, drafted = simulation.spent, 0, 0
    with drafter.active(state):
        while state.unfinished:
            tree = drafter.draft(state, state.draft_limits)
            simulation.run(simulation.machine.verify_seconds(tree.num_nodes - 1))
            verdict = verify(tree, answer.tokens[state.generated[0] :])
            state.commit(verdict)
            drafter.observe(verdict, ForwardOutput(torch.empty(0)))
            rounds += 1
            drafted += tree.num_nodes - 1
    return {"time": simulation.spent - start, "rounds": rounds, "drafted": drafted}


def verify(tree: DraftTree, answer: Sequence[int]) -> Verdict:
    """Accept the path that equals the answer."""
    path = [0]
    for token in answer:
        child = tree.child(path[-1], token)
        if child is None:
            break
        path.append(child)
    return Verdict(tree, [path[1:]], [answer[len(path) - 1]])


def fixed_time(answer: Answer, machine: Machine, length: int) -> float:
    """Return the time of an answer with drafts of a fixed length; length 0 is `none`."""
    position, spent, read = 0, 0.0, -len(answer.prompt)
    while position < len(answer.tokens):
        drafted = min(length, len(answer.tokens) - position - 1)
        unread = position - read
        spent += sum(machine.draft_seconds(level, unread) for level in range(drafted))
        read = position if drafted else read
        spent += machine.verify_seconds(drafted)
        position += 1 + min(drafted, answer.run_length(position))
    return spent


def load(path: Path, assistant: str, longest: int | None = None) -> list[Answer]:
    """Read the first `longest` tokens of the answers of a record that have at least two."""
    answers = json.loads(gzip.decompress(path.read_bytes()))["answers"]
    kept = slice(longest)
    return [
        Answer(a["task"], a["prompt"], a["answer"][kept], a["proposals"][assistant][kept])
        for a in answers
        if len(a["answer"]) > 1
    ]


def study(
    answers: Sequence[Answer], machine: Machine, strategy: str, cold: bool, seed: int = 0
) -> dict[str, Any]:
    """Return the times of all answers with the policy, compared with fixed lengths.

    With `cold`, each answer is the first one of a process; otherwise costs and acceptance rates of
    earlier answers are cached.
    """
    simulation = Simulation(machine, seed)
    cost_model_drafter.clock_of = lambda _: simulation  # type: ignore[assignment]
    runs, fixed = [], []
    for answer in answers:
        if cold or not runs:
            times = RoundTimes()
            cost_model_drafter.cached_times = lambda *_, times=times: times  # type: ignore
        runs.append(generate(make(strategy, simulation, answer), simulation, answer))
        fixed.append([fixed_time(answer, machine, length) for length in FIXED_LENGTHS])
    totals = [sum(times) for times in zip(*fixed, strict=True)]
    policy = sum(run["time"] for run in runs)
    worst = max(run["time"] / times[0] for run, times in zip(runs, fixed, strict=True))
    return {
        **asdict(machine),
        "strategy": strategy,
        "cold": cold,
        "speedup": totals[0] / policy,
        "best_length": min(FIXED_LENGTHS, key=totals.__getitem__),
        "over_best_fixed": policy / min(totals),
        "over_best_of_each": policy / sum(map(min, fixed)),
        "over_none": policy / totals[0],
        "worst_over_none": worst,
        "times": [round(run["time"], 2) for run in runs],
    }


def compare(answers: Sequence[Answer], machine: Machine, num_seeds: int = 3) -> dict[str, Any]:
    """Return the speedup of every strategy over `none` by task, after earlier answers.

    Answers follow each other in order. Times are means over the seeds of the noise.
    """
    tasks = list(dict.fromkeys(answer.task for answer in answers))
    totals = {name: dict.fromkeys(("none", *STRATEGIES), 0.0) for name in (*tasks, "all")}
    for strategy, seed in itertools.product(STRATEGIES, range(num_seeds)):
        times = study(answers, machine, strategy, cold=False, seed=seed)["times"]
        for answer, time in zip(answers, times, strict=True):
            for name in (answer.task, "all"):
                totals[name][strategy] += time / num_seeds
    for answer in answers:
        for name in (answer.task, "all"):
            totals[name]["none"] += fixed_time(answer, machine, 0)
    speedups = {
        name: {strategy: of["none"] / time for strategy, time in of.items()}
        for name, of in totals.items()
    }
    return {**asdict(machine), "speedups": speedups}


def comparison_table(cells: Sequence[dict[str, Any]]) -> str:
    """Return Markdown: per machine and task the speedups, and `auto` over the best other one."""
    rows = []
    for cell in cells:
        for task, speedups in cell["speedups"].items():
            best = max(speedups[name] for name in STRATEGIES if name != "auto")
            values = [f"{speedups[name]:.2f}" for name in STRATEGIES]
            machine = f"{cell['draft_cost']}, {cell['node_cost']}"
            rows.append([machine, task, *values, f"{speedups['auto'] / best:.2f}"])
    head = ["draft token, node", "task", *STRATEGIES, "auto over the best"]
    return Table(head, rows).markdown()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--assistant", required=True)
    parser.add_argument("--strategy", default="draft", choices=STRATEGIES)
    parser.add_argument("--compare", action="store_true", help="all strategies by task")
    parser.add_argument("--draft-cost", type=float, action="append")
    parser.add_argument("--node-cost", type=float, action="append")
    parser.add_argument(
        "--read-cost", type=float, help="in draft tokens", default=Machine.read_cost
    )
    parser.add_argument("--every", type=int, help="use every Nth answer only", default=1)
    parser.add_argument("--longest", type=int, help="first tokens of an answer to use")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    answers = load(options.traces, options.assistant, options.longest)[:: options.every]
    node_costs = options.node_cost or NODE_COSTS
    draft_costs = options.draft_cost or DRAFT_COSTS
    machines = [
        Machine(draft_cost, node_cost, options.read_cost)
        for draft_cost, node_cost in itertools.product(draft_costs, node_costs)
    ]
    if options.compare:
        cells = [compare(answers, machine) for machine in machines]
        print(comparison_table(cells))
        if options.out:
            write_json(options.out, {"assistant": options.assistant, "compared": cells})
        return
    cells = []
    for cold, machine in itertools.product((True, False), machines):
        cell = study(answers, machine, options.strategy, cold)
        cells.append(cell)
        print(
            f"{'cold' if cold else 'warm'} draft {machine.draft_cost:<5} "
            f"node {machine.node_cost:<6} "
            f"best {cell['best_length']:>2} speedup {cell['speedup']:.2f} "
            f"over best fixed {cell['over_best_fixed']:.3f} "
            f"best of each {cell['over_best_of_each']:.3f} none {cell['over_none']:.3f} "
            f"worst {cell['worst_over_none']:.3f}",
            flush=True,
        )
    if options.out:
        write_json(options.out, {"assistant": options.assistant, "cells": cells})


if __name__ == "__main__":
    main()
