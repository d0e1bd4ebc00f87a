"""The oracle: drafts until its first mismatch, which only a recording of the target can tell.

The upper bound of what a length policy can reach with a draft model (Mamou et al. 2024, arXiv
2405.04304, section 3). For benchmarks alone: it is given the answer, so no config names it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.bench.contenders import Contender, Run, speculative
from hf_spec.decoding.engine import generate_with
from hf_spec.decoding.length_policy import DraftedToken, LengthPolicy
from hf_spec.strategies.draft_model import DraftConfig, DraftModelDrafter


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

    The answer of a prompt is recorded by plain greedy `generate()` the first time it is met;
    `count` does so untimed, and `measure` calls it before the clock starts.

    Args:
        model: the target.
        draft: shares its vocabulary.
        name: as it appears in tables.
    """
    recorded: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def answer(ids: Tensor, new_tokens: int) -> list[int]:
        key = tuple(ids[0].tolist()), new_tokens
        if key not in recorded:
            prompt = ids.to(model.device)
            sequence = model.generate(prompt, max_new_tokens=new_tokens, do_sample=False)[0]
            recorded[key] = sequence[ids.shape[1] :].tolist()
        return recorded[key]

    def run(ids: Tensor, new_tokens: int) -> Run:
        policy = OraclePolicy([answer(ids, new_tokens)])
        drafter = DraftModelDrafter(DraftConfig(), draft, policy)
        return speculative(model, ids, new_tokens, custom_generate=partial(generate_with, drafter))

    def count(ids: Tensor, new_tokens: int) -> int:
        return run(ids, new_tokens).target_forwards or 0

    return Contender(name, run, count)
