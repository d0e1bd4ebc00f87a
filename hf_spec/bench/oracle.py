"""The oracle: drafts until its first mismatch, which only a recording of the target can tell.

The upper bound of what a length policy can reach with a draft model (Mamou et al. 2024, arXiv
2405.04304, section 3). For benchmarks alone: it is given the answer, so no config names it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.bench.contenders import Contender, PlainAnswers, Run, speculative
from hf_spec.decoding.drafter import Drafter
from hf_spec.drafting.length_policy import DraftedToken, LengthPolicy
from hf_spec.drafting.model_drafter import DraftModelDrafter
from hf_spec.execution.vocabulary import num_embeddings
from hf_spec.generation.one_call import generate_with
from hf_spec.strategies.draft_model import DraftConfig


class OraclePolicy(LengthPolicy):
    """Stop behind the first token that is not the target's.

    Args:
        answers: per row the tokens that the target generates, prompt excluded.
        max_draft_tokens: most tokens drafted in a round; without a limit by default.
    """

    def __init__(self, answers: Sequence[Sequence[int]], max_draft_tokens: int = sys.maxsize):
        super().__init__(max_draft_tokens)
        self.answers = answers

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Whether each token is the one that the target says there."""
        return [self._is_right(token) for token in newest]

    def _is_right(self, drafted: DraftedToken) -> bool:
        answer = self.answers[drafted.row]
        return drafted.position < len(answer) and answer[drafted.position] == drafted.token


def oracle(model: Any, draft: PreTrainedModel, name: str = "oracle") -> Contender:
    """A chain of `draft` under the oracle's policy.

    Args:
        model: the target.
        draft: shares its vocabulary.
        name: as it appears in tables.
    """

    def drafter(answers: list[list[int]]) -> Drafter:
        return DraftModelDrafter(DraftConfig(), draft, OraclePolicy(answers), num_embeddings(model))

    return knowing(model, drafter, name)


def knowing(model: Any, make_drafter: Callable[[list[list[int]]], Drafter], name: str) -> Contender:
    """A contender whose drafter is given the plain greedy answers.

    They are recorded the first time a prompt is met, which `prepare` does untimed.

    Args:
        model: the target.
        make_drafter: called with the answer of each row, for every generation.
        name: as it appears in tables.
    """
    answers = PlainAnswers(model)

    def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        decode = partial(generate_with, make_drafter(answers(ids, new_tokens, mask)))
        return speculative(model, ids, new_tokens, mask, custom_generate=decode)

    def prepare(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> None:
        answers(ids, new_tokens, mask)

    return Contender(name, run, prepare, ours=True)
