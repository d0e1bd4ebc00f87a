"""Oracle and synthetic contenders, which draft from the target's recorded output.

- *Oracle*: a draft model drafts until its first mismatch, the upper bound of every length policy
  with this model (Mamou et al. 2024, arXiv 2405.04304, section 3).
- *Synthetic*: each draft is a chain of the next tokens of plain greedy `generate()`, each replaced
  by a wrong token with probability 1 - p. It measures everything except drafting. Its speed is an
  upper bound for a drafter with this acceptance; every report must state that.

No config selects them. The output is the target's own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.drafting.length_policy import DraftedToken, LengthPolicy
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.evaluation.bench.contenders import (
    BaselineOutputs,
    Contender,
    Outputs,
    Run,
    plain,
    speculative,
)
from hf_spec.generation.one_call import generate_with
from hf_spec.methods.draft_model.config import DraftConfig
from hf_spec.methods.draft_model.drafter import DraftModelDrafter


def _contender(model: Any, make_drafter: Callable[[Outputs], Drafter], name: str) -> Contender:
    """Return a contender whose drafter is made from the baseline's outputs in every generation."""
    baseline = BaselineOutputs(plain(model))

    def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        decode = partial(generate_with, make_drafter(baseline(ids, new_tokens, mask)))
        return speculative(model, ids, new_tokens, mask, custom_generate=decode)

    def prepare(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> None:
        # Records the outputs of new prompts untimed.
        baseline(ids, new_tokens, mask)

    return Contender(name, run, prepare, ours=True)


class OraclePolicy(LengthPolicy):
    """Length policy that stops after the first token that differs from the target's `outputs`."""

    def __init__(self, outputs: Outputs, max_draft_tokens: int = sys.maxsize):
        super().__init__(max_draft_tokens)
        self.outputs = outputs

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Return True for each token that equals the target's at its position."""
        targets = [self.outputs[token.row][token.position :][:1] for token in newest]
        return [list(t) == [token.token] for t, token in zip(targets, newest, strict=True)]


def oracle(model: Any, draft: PreTrainedModel) -> Contender:
    """Return chains of `draft`, which has the target's vocabulary, cut by `OraclePolicy`."""

    def drafter(outputs: Outputs) -> Drafter:
        return DraftModelDrafter(DraftConfig(), draft, OraclePolicy(outputs), num_embeddings(model))

    return _contender(model, drafter, "oracle")


class SyntheticDrafter(Drafter):
    """Chains of `length` correct tokens, each left unchanged with probability `acceptance`."""

    def __init__(self, outputs: Outputs, acceptance: float, length: int, vocab_size: int):
        self.outputs, self.acceptance = outputs, acceptance
        self.length, self.vocab_size = length, vocab_size

    def start(self, state: GenerationState) -> None:
        """Seed by the outputs, so that every repetition has the same errors."""
        self._random = random.Random(str(self.outputs))  # noqa: S311 - no secret

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Draft the next tokens of every unfinished row."""
        drafts = {}
        for row, limit in limits.items():
            begin = state.generated[row]
            end = begin + min(self.length, limit)
            chain = [
                token if self._random.random() < self.acceptance else (token + 1) % self.vocab_size
                for token in self.outputs[row][begin:end]
            ]
            drafts[row] = [state.tokens[row][-1], *chain], list(range(-1, len(chain)))
        return DraftTree.from_drafts(drafts, state.num_rows)


def synthetic(model: Any, acceptance: float, length: int) -> Contender:
    """Return chains of `length` tokens, each correct with probability `acceptance`."""
    vocab_size = model.config.get_text_config().vocab_size

    def drafter(outputs: Outputs) -> Drafter:
        return SyntheticDrafter(outputs, acceptance, length, vocab_size)

    return _contender(model, drafter, f"synthetic, {length} tokens, acceptance {acceptance:g}")
