"""Drafts from a Gemma 4 assistant, which reads the target's keys and values and has none itself.

Google publishes one for every Gemma 4. It keeps nothing between rounds: a step needs a token, the
state of its parent and what the target has stored (`hf_spec.models.gemma_assistant`). So a level of
a tree is one pass, however wide, and there is nothing to be fed after a round.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.decoding.drafter import Drafter
from hf_spec.decoding.state import GenerationState
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.measured import with_policy
from hf_spec.drafting.model_drafter import DraftModelDrafter, Growth
from hf_spec.execution.runner import ForwardOutput, ModelRunner
from hf_spec.execution.tree import DraftTree, Verdict
from hf_spec.execution.vocabulary import fit_logits, num_embeddings
from hf_spec.models.assistant_runner import AssistantRunner
from hf_spec.models.gemma_assistant import FAMILY, STRATEGY, GemmaAssistant
from hf_spec.strategies.assistants import resolve_published
from hf_spec.strategies.draft_model import TreeConfig
from hf_spec.strategies.registry import register


def _make(config: GemmaAssistantConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    found = resolve_published(STRATEGY, assistant, target, (FAMILY,))
    found.base.check(target)
    make = partial(GemmaAssistantDrafter, assistant=found, target=target)
    return with_policy(config, target, make, config.children)


def _make_for_auto(target: PreTrainedModel, assistant: object, batching: str) -> Drafter:
    # Which nodes are worth sending is decided there.
    whole = GemmaAssistantConfig(max_draft_tokens=5, max_nodes=24, batching=batching)
    return _make(whole, target, assistant)


@register(STRATEGY, _make, _make_for_auto)
@dataclass(frozen=True)
class GemmaAssistantConfig(TreeConfig):
    """Options of a Gemma assistant's drafts, those of `TreeConfig`; `children=1` is a chain."""

    adapter_methods = ()


class GemmaAssistantDrafter(DraftModelDrafter):
    """Grows chains and trees as a draft model does, with a pass of the assistant per level."""

    # From `start` on.
    _runner: AssistantRunner  # type: ignore[assignment]

    hidden_layers = (-1,)
    no_candidates = (
        "an assistant needs the target's states, keys and values, which assisted decoding does not "
        f"hand on; use spec_strategy={STRATEGY!r}"
    )

    def __init__(
        self,
        config: GemmaAssistantConfig,
        policy: LengthPolicy | None = None,
        *,
        assistant: GemmaAssistant,
        target: PreTrainedModel,
    ):
        super().__init__(config, target, policy, num_embeddings(target))
        self.assistant = assistant

    @property
    def timing_key(self) -> Hashable:
        """The assistant."""
        return id(self.assistant)

    def prefill(self, run: Callable[[ModelRunner], object]) -> None:
        """Nothing: what a prompt shows is in the target's keys and values."""

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """One tree per unfinished row, a root alone before the target has run its prompt."""
        known = {row: n if self._runner.can_draft(row) else 0 for row, n in limits.items()}
        return super().draft(state, known)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Take the states that the next drafts begin from; tell the policy."""
        self._runner.learn(verdict, output)
        self.policy.observe_all(verdict)

    def _make_runner(self, num_rows: int) -> AssistantRunner:  # type: ignore[override]
        return AssistantRunner(self.assistant, self.model.get_input_embeddings())

    def _run(
        self,
        state: GenerationState,
        growths: dict[int, Growth],
        tree: DraftTree,
        owners: Sequence[tuple[int, int]],
    ) -> Tensor:
        nodes = []
        for row, node in owners:
            graph = growths[row].graph
            nodes.append((row, node, graph.parents[node], graph.tokens[node]))
        logits = self._runner.run(nodes)
        size = self.vocab_size or logits.shape[-1]
        return logits if logits.shape[-1] == size else fit_logits(logits, size)
