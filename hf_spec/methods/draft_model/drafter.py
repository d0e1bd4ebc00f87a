"""Drafts from a smaller model, grown level by level (see `level_drafter`).

Each level is one forward of the draft model over all rows; its keys and values stay, so the draft
model never sees a token twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.common.errors import OptionError, choices
from hf_spec.drafting.device_growth import DeviceGrowth
from hf_spec.drafting.length_policy import LengthPolicy, make_policy
from hf_spec.drafting.level_drafter import (
    FewTokens,
    Graphs,
    LevelConfig,
    LevelDrafter,
    Owners,
)
from hf_spec.drafting.tree_growth import expanded_subtree
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.device_tokens import DeviceTokens
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.runner import ModelRunner
from hf_spec.engine.forward.vocabulary import num_embeddings

# How drafts of a model with another tokenizer become the target's tokens.
TRANSLATIONS = ("shared", "text")


@dataclass(frozen=True)
class DraftModelConfig(LevelConfig):
    """Options of drafts from a model; by themselves, those of a chain.

    Attributes:
        translation: of drafts from a model with another tokenizer (see
            `hf_spec.methods.draft_model.other_tokenizer.drafter`): "shared" drafts what both
            vocabularies have, "text" encodes again what was drafted. None is "shared" if these are
            half of the target's.
    """

    takes_tokenizers = True

    translation: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.translation not in (None, *TRANSLATIONS):
            raise OptionError(
                f"translation={self.translation!r}; {choices(self.translation, TRANSLATIONS)}"
            )


class FewTokensHead(FewTokens, Protocol):
    """The head of a draft model that knows some of the tokens."""

    def alone(self) -> AbstractContextManager[None]:
        """Let forwards of this thread end in the logits of these alone."""


class DraftModelDrafter(LevelDrafter):
    """Grows a chain, a tree or a graph per row with a draft model of the target's vocabulary.

    By default the policy is the configured one, if it needs no adapter. `vocab_size` is V of the
    target, where the draft model's own differs by padding.
    """

    # From `start` on.
    _runner: ModelRunner
    _head: FewTokensHead | None

    # Whether the tokens that it drafts are those that the draft model reads next.
    reads_own_tokens: ClassVar[bool] = True

    def __init__(
        self,
        config: DraftModelConfig,
        model: PreTrainedModel,
        policy: LengthPolicy | None = None,
        vocab_size: int | None = None,
    ):
        config = config.resolve(measures=False)
        super().__init__(config, policy or make_policy(config, model))
        self.model = model
        self.vocab_size = vocab_size

    @property
    def timing_key(self) -> Hashable:
        """The draft model."""
        return id(self.model)

    def start(self, state: GenerationState) -> None:
        """Empty keys and values for every row."""
        super().start(state)
        self._runner = self._make_runner(state.num_rows)
        self._head = None if self._translates else _few_tokens(self.model)
        if self._head is not None:
            self.draft_few(self._head, state.device)
        self._runner.expected_length = state.expected_length

    @property
    def _translates(self) -> bool:
        """Whether its tokens are not simply those of the target."""
        return self.vocab_size not in (None, num_embeddings(self.model))

    def _asked(self) -> AbstractContextManager[None]:
        """Where forwards are run, for the logits of the known tokens alone if these are enough."""
        if self._head is None or self.processors.reads_tokens:
            return nullcontext()
        return self._head.alone()

    def _make_runner(self, num_rows: int) -> ModelRunner:
        batching, size = self.config.batching, self.vocab_size
        runner = ModelRunner(self.model, num_rows, batching=batching, vocab_size=size)
        runner.rounded = True
        return runner

    def restart(self, row: int) -> None:
        """Empty keys and values for one row, and a policy that knows nothing of it."""
        super().restart(row)
        self._runner.restart(row)

    def prefill(self, run: Callable[[ModelRunner], object]) -> None:
        """Let the draft model run a prompt that is more than tokens."""
        assert self._runner is not None, "prompts run while active"
        run(self._runner)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Keep the accepted part of the draft model's keys and values; tell the policy."""
        kept = self.accepted(verdict)
        for row, ran in self.ran.items():
            places = {node: place for place, node in enumerate(ran)}
            # Leaves did not run, and nothing after them.
            known = takewhile(places.__contains__, kept[row])
            kept[row] = [places[node] for node in known]
        self._runner.keep(kept)

    @property
    def supports_device_growth(self) -> bool:
        """On a GPU, where the tokens of a level can go straight into the next one."""
        # Gaps in the storage would be among what the device says the nodes see.
        placed = self.shape.children == 1 or not self._runner.batching.pads_kv
        return self.reads_own_tokens and placed and self._runner.supports_device_tokens

    def propose_on_device(self, state: GenerationState, growing: DeviceGrowth) -> Tensor:
        """(nodes, R) float32: the draft model's distribution after each node that runs next."""
        # Only the device knows the tokens; their places are all that is asked of the tree.
        count = len(growing.parents)
        drafts = {row: ([state.tokens[row][-1]] * count, growing.parents) for row in growing.rows}
        tree = DraftTree.from_drafts(drafts, state.num_rows)
        nodes = [node for row in growing.rows for node in tree.nodes(row)[-growing.width :]]
        with self._asked():
            if growing.tokens is None:
                output = self._runner.forward(tree, state.tokens, nodes)
            else:
                given = DeviceTokens(growing.tokens, growing.sees).to(self._runner.device)
                output = self._runner.forward_device_tokens(tree, state.tokens, nodes, given)
        logits = output.logits.to(state.device, torch.float32)
        return self.processed_unread(growing.owners, logits)

    def probabilities(self, state: GenerationState, graphs: Graphs, owners: Owners) -> Tensor:
        """(nodes, R) float32: the draft model's distribution after each (row, node)."""
        # What ran alone is stored.
        drafts = {row: expanded_subtree(graph, self.ran[row]) for row, graph in graphs.items()}
        tree = DraftTree.from_drafts(drafts, state.num_rows)
        counts = Counter(row for row, _ in owners)
        nodes = [node for row in graphs for node in tree.nodes(row)[-counts[row] :]]
        with self._asked():
            output = self._runner.forward(tree, state.tokens, nodes)
        logits = output.logits.to(state.device, torch.float32)
        return self.processed(state, graphs, owners, logits)


def _few_tokens(model: PreTrainedModel) -> FewTokensHead | None:
    """The head of a draft model that does not know all tokens; None if it does."""
    head: Any = model.get_output_embeddings()
    return None if getattr(head, "vocabulary", None) is None else head
