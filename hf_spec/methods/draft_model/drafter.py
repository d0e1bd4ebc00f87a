"""Options of `draft` (a chain) and `tree`, and the drafter of both."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import takewhile
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.common.errors import OptionError, choices
from hf_spec.drafting.config import AUTO, AssistantConfig
from hf_spec.drafting.device_growth import DeviceGrowth
from hf_spec.drafting.length_policy import LengthPolicy, make_policy
from hf_spec.drafting.level_drafter import LevelConfig, LevelDrafter
from hf_spec.drafting.tree_growth import Growth
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.fast.cuda_graphs import StepGraphs
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.model_cache import cached_per_model
from hf_spec.engine.forward.node_tokens import DeviceTokens
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.packing import PreparedPass
from hf_spec.engine.forward.padded_batching import BATCHING
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.feature_pairs.draft_head import FewTokensHead

# How drafts of a model with another tokenizer become the target's tokens.
TRANSLATIONS = ("shared", "text")


# `hf_spec.methods.draft_model.loading` registers both configs.
@dataclass(frozen=True)
class DraftConfig(LevelConfig, AssistantConfig):
    """Options of drafts from a model; a chain by default.

    Attributes:
        translation: how drafts from a model with another tokenizer become the target's tokens (see
            `hf_spec.methods.draft_model.other_tokenizer.drafter`). "shared" drafts the tokens of
            both vocabularies, "text" encodes the drafted text again. None is "shared" if both
            vocabularies share at least half of the target's tokens.
    """

    adapter_methods: ClassVar[tuple[str, ...] | None] = ("draft",)
    takes_tokenizers = True

    translation: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.translation not in (None, *TRANSLATIONS):
            raise OptionError(
                f"translation={self.translation!r}; {choices(self.translation, TRANSLATIONS)}"
            )


@dataclass(frozen=True)
class TreeConfig(DraftConfig):
    """Options of a tree from a draft model; `max_draft_tokens` is its depth.

    Attributes:
        children: most children per node.
        expanded_per_level: most nodes per level that get children, the most probable paths first.
        max_nodes: most nodes sent to the target, root excluded, the most probable paths first;
            "auto" lets the cost model choose; None is 15.
        min_probability: a node less probable than this gets no children.
        min_sibling_ratio: a child less probable than this share of its best sibling is dropped.
    """

    sizes: ClassVar[tuple[str, ...]] = ("max_draft_tokens", "max_nodes")
    usual = MappingProxyType({"max_draft_tokens": 5, "max_nodes": 15})
    longest = MappingProxyType({"max_draft_tokens": 8, "max_nodes": 24})

    sample_drafts: bool = False
    children: int = 3
    expanded_per_level: int = 4
    max_nodes: int | str | None = AUTO
    min_probability: float = 0.0
    min_sibling_ratio: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("children", "expanded_per_level"):
            self.check(name, 1)
        for name in ("min_probability", "min_sibling_ratio"):
            self.check(name, 0, 1)


class DraftModelDrafter(LevelDrafter):
    """Grows a chain, a tree or a graph per row with a draft model.

    `policy` is by default the configured one, if that needs no adapter; `vocab_size` is V of the
    target, if padding makes the draft model's differ.
    """

    # From `start` on.
    _runner: ModelRunner
    _head: FewTokensHead | None

    def __init__(
        self,
        config: DraftConfig,
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

    def relative_cost(self, target: PreTrainedModel) -> float:
        """Return the ratio of the weights, since small steps are memory-bound."""
        return _step_bytes(self.model) / max(_step_bytes(target), 1)

    def start(self, state: GenerationState) -> None:
        """Empty the KV cache of every row."""
        super().start(state)
        self._runner = self._make_runner(state.num_rows)
        self._runner.expected_length = state.expected_length
        # A trained draft model may draft some tokens only.
        head: Any = self.model.get_output_embeddings()
        self._head = None
        if isinstance(head, FewTokensHead) and head.vocabulary is not None and not self._translates:
            self._head = head
            self.restrict_vocabulary(head.vocabulary.to(state.device), head.full_size)

    @property
    def _translates(self) -> bool:
        """True if the target's token ids differ from the draft model's."""
        return self.vocab_size not in (None, num_embeddings(self.model))

    def _make_runner(self, num_rows: int) -> ModelRunner:
        batching, size = self.config.batching, self.vocab_size
        runner = ModelRunner(self.model, num_rows, batching=batching, vocab_size=size)
        runner.rounded = True
        return runner

    def restart(self, row: int) -> None:
        """Empty the KV cache of the row, and reset its policy."""
        super().restart(row)
        self._runner.restart(row)

    def visit_runner(self, visit: Callable[[ModelRunner], object]) -> None:
        """Let the draft model run a prompt that is more than tokens."""
        visit(self._runner)

    def max_levels(self, state: GenerationState, limits: Mapping[int, int]) -> Mapping[int, int]:
        """Return `limits`, reduced where the draft model has fewer positions.

        Tokens past its last position are never read. The last level of a draft does not run.
        """
        return self._runner.limit_depths(limits, self._sequences(state), unrun=1)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Keep the accepted part of the KV cache, and update the policy."""
        accepted = self.accepted(verdict)
        for row, expanded in self.expanded_nodes.items():
            indices = {node: index for index, node in enumerate(expanded)}
            # Leaves did not run, and nothing after them.
            stored = takewhile(indices.__contains__, accepted[row])
            accepted[row] = [indices[node] for node in stored]
        self._runner.keep(accepted)

    @property
    def supports_device_growth(self) -> bool:
        """True on a GPU."""
        # The bits that the device computes for trees have no room for gaps in the KV cache.
        has_bits = self.shape.children == 1 or not BATCHING[self.config.batching].pads_kv
        return has_bits and self._runner.supports_device_tokens

    @property
    def step_graphs(self) -> StepGraphs:
        """Return the graphs of the draft model's steps."""
        return self._runner.step_graphs

    @property
    def program_key(self) -> Hashable:
        """See `LevelDrafter`; also whether the head returns few logits."""
        return super().program_key, self._restricted_head is not None

    def prepare_pass(self, state: GenerationState, growth: DeviceGrowth) -> PreparedPass:
        """See `LevelDrafter`."""
        tree, nodes = self._nodes_of(state, growth)
        return self._runner.prepare(tree, state.tokens, nodes, growth.visible_bytes)

    def probabilities(self, state: GenerationState, growth: Growth) -> Tensor:
        """Return the (M, R) distributions of the draft model, from one forward pass."""
        head = self._restricted_head
        with nullcontext() if head is None else head.restrict_logits():
            if isinstance(growth, DeviceGrowth):
                tokens = None
                if growth.tokens_on_device:
                    tokens = DeviceTokens(growth.tokens, growth.visible).to(self._runner.device)
                output = self._runner.run_prepared(growth.prepared, tokens)
            else:
                tree, nodes = self._nodes_of(state, growth)
                output = self._runner.forward(tree, state.tokens, nodes)
        return self.processed(state, growth, output.logits.to(state.device, torch.float32))

    def _sequences(self, state: GenerationState) -> Sequence[Sequence[int]]:
        """Return per row the tokens that the draft model reads."""
        return state.tokens

    @property
    def _restricted_head(self) -> FewTokensHead | None:
        """The head, if it returns the logits of its own tokens only."""
        # A processor that reads token ids needs the logits of all tokens.
        return None if self.processors.reads_tokens else self._head

    def _nodes_of(self, state: GenerationState, growth: Growth) -> tuple[DraftTree, list[int]]:
        """Return the nodes that have run or run now as a tree, and which of them run now."""
        drafts = {row: growth.expanded_subtree(row) for row in growth.rows}
        tree = DraftTree.from_drafts(drafts, state.num_rows)
        return tree, [n for row in growth.rows for n in tree.nodes(row)[-growth.num_nodes(row) :]]


def _step_bytes(model: PreTrainedModel) -> int:
    """Return how many bytes of weights a decoding step of `model` reads."""

    def count() -> int:
        embedding, head = (
            set() if module is None else set(module.parameters())
            for module in (model.get_input_embeddings(), model.get_output_embeddings())
        )
        read = [p for p in model.parameters() if p not in embedding or p in head]
        return sum(weight.numel() * weight.element_size() for weight in read)

    return cached_per_model(model, "step bytes", count)
