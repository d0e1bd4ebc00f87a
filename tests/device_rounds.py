"""Rounds of tiny models on the fake GPU: their tokens, drafts and costs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import EosTokenCriteria, MaxLengthCriteria

from hf_spec.adapters.published import read_published
from hf_spec.backend.device.capture import warm_ups
from hf_spec.drafting.cost_model.cost_curves import Costs
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.loop import finish_step
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.fast.cuda_graphs import StepGraphs
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.eagle.head import build as build_eagle
from hf_spec.methods.registry import make_drafter
from tests import mtp_reference, tiny_models
from tests.fake_gpu import FakeGpu, OnGpu, on_gpu, pretended, recording
from tests.falcon_reference import random_head
from tests.gemma_reference import random_assistant
from tests.published_heads import sample


def draft_model() -> Any:
    return tiny_models.draft_model("llama")


def falcon_head() -> Any:
    return random_head("llama")


def eagle_head() -> Any:
    found = read_published(sample("eagle3").folder)
    assert found is not None
    return build_eagle(found, tiny_models.build("llama"))


def mtp_modules() -> Any:
    return mtp_reference.sample("llama", "index").head


def gemma_assistant() -> Any:
    return random_assistant("llama")


@dataclass
class Case:
    """Settings of a generation.

    Attributes:
        config: the strategy.
        assistant: returns the draft model or head, on the CPU.
        model: name of the tiny target.
        num_rows, new_tokens: size of the output.
        ends: tokens that end a row.
        processors: logits processors.
        sampled: sample the tokens.
        level_cost: time of a draft level in target steps, for the default length policy. Times
            measured on the fake device would not be realistic.
    """

    config: Any
    assistant: Callable[[], Any] = lambda: None
    model: str = "llama"
    num_rows: int = 1
    new_tokens: int = 24
    ends: tuple[int, ...] = ()
    processors: list[Any] = field(default_factory=list)
    sampled: bool = False
    level_cost: float | None = None

    def begin(self, there: Callable[[Tensor], Tensor]) -> GenerationState:
        """Return a state with prompts of several lengths; `there` moves tensors to a device."""
        settled = tiny_models.settled_prompt(self.model)[0]
        rows = [settled[: len(settled) - 3 * row] for row in range(self.num_rows)]
        ids, mask = (there(tensor) for tensor in tiny_models.left_padded(rows).values())
        length = ids.shape[1] + self.new_tokens
        rules: list[Any] = [MaxLengthCriteria(length)]
        rules += [EosTokenCriteria(list(self.ends))] if self.ends else []
        options: dict[str, Any] = {"processors": self.processors, "do_sample": self.sampled}
        stop = StopRules(rules, self.num_rows)
        return GenerationState.create(ids, mask, stop, expected_length=length, **options)

    def drafter(self, model: Any, assistant: Any) -> Any:
        drafter: Any = make_drafter(self.config, model, assistant)
        if (cost := self.level_cost) is not None:
            drafts = {self.config.strategy: lambda depth: cost * depth}
            drafter._configured_costs = Costs(lambda nodes: 1.0 + 0.02 * nodes, drafts)
        return drafter


@dataclass
class Round:
    """Draft of a round, its depth limit and costs, and whether a graph was prepared or captured."""

    tree: DraftTree
    limit: int
    launches: int
    waits: int
    sends: int
    sent_bytes: int
    fetched_bytes: int
    settles: bool


@dataclass
class Call:
    """Tokens and rounds of a call, with its numbers of captures and of whole-draft graphs."""

    tokens: list[list[int]]
    rounds: list[Round]
    captures: int
    programs: int

    @property
    def drafts(self) -> list[tuple[list[int], list[int]]]:
        return [(one.tree.tokens, one.tree.parent) for one in self.rounds]


def graphs_of(drafter: Any) -> StepGraphs | None:
    """Return the graphs of an active drafter, also if a cost model wraps it."""
    drafter = drafter._main.drafter if hasattr(drafter, "_main") else drafter
    graphs: StepGraphs | None = getattr(drafter._runner, "_graphs", None)
    return graphs


@torch.no_grad()
def decode(case: Case, model: Any, drafter: Drafter, gpu: FakeGpu | None = None) -> Call:
    """Decode all rows, on the CPU if there is no `gpu`."""
    torch.manual_seed(0)
    state = case.begin(OnGpu if gpu else lambda tensor: tensor)
    target = ModelRunner(model, case.num_rows, drafter.hidden_layers)
    target.expected_length = state.expected_length
    rounds, log = [], gpu or FakeGpu()
    with target.active(), drafter.active(state):
        verifier = drafter.make_verifier(case.processors, case.num_rows)
        while state.unfinished:
            log.restart()
            before = warm_ups.count
            limits = state.draft_limits
            tree = drafter.draft(state, limits)
            readout = verifier.readout(tree, state)
            output = target.forward(tree, state.tokens, readout=readout)
            finish_step(target, drafter, verifier, state, tree, output)
            rounds.append(
                Round(
                    tree,
                    min(limits.values()),
                    log.launches,
                    # The host waits at the end of every fetch.
                    sum(log.waits.values()) + log.fetches,
                    log.sends,
                    log.sent_bytes,
                    log.fetched_bytes,
                    warm_ups.count > before,
                )
            )
        graphs = graphs_of(drafter)
        recorded = [] if graphs is None else list(graphs._recorded)
        programs = sum(bucket.program is not None for bucket in recorded)
        captures = target.graph_counts[1] + (0 if graphs is None else graphs.captures)
    return Call(state.tokens, rounds, captures, programs)


class Device:
    """Fake GPU that holds the model and the assistant of a case."""

    def __init__(self, case: Case, monkeypatch: pytest.MonkeyPatch):
        self.case = case
        assistant = case.assistant()
        tiny_models.settled_prompt(case.model)
        self._stack = ExitStack()
        self.gpu = self._stack.enter_context(pretended(monkeypatch))
        self._stack.enter_context(recording(monkeypatch, self.gpu))
        self.model = on_gpu(tiny_models.build(case.model))
        self.assistant = None if assistant is None else on_gpu(assistant)
        if case.assistant is mtp_modules:
            # The head does not contain the target's embedding.
            self.assistant._shared = [self.model.get_input_embeddings()]

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def drafter(self) -> Drafter:
        drafter: Drafter = self.case.drafter(self.model, self.assistant)
        return drafter

    def decode(self, case: Case | None = None, drafter: Drafter | None = None) -> Call:
        return decode(case or self.case, self.model, drafter or self.drafter(), self.gpu)
