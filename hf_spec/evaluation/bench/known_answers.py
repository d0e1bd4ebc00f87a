"""Contenders that are given the target's answer, so no config names them.

*Oracle*: a draft model drafts until its first mismatch, the upper bound of what a length policy
can reach with it (Mamou et al. 2024, arXiv 2405.04304, section 3). *Synthetic*: each draft is a
chain of what plain greedy `generate()` says next, every token of it wrong with probability 1 - p.
That measures everything but the drafting: forwards over so many nodes, verification, keys and
values. Its speed is an upper bound for a drafter of this acceptance, whose own time comes on top;
every report has to say so. The output stays the target's own.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.drafting.length_policy import DraftedToken, LengthPolicy
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.evaluation.bench.contenders import Contender, Run, plain, speculative
from hf_spec.generation.one_call import generate_with
from hf_spec.methods.draft_model.config import DraftConfig
from hf_spec.methods.draft_model.drafter import DraftModelDrafter

# Per row the tokens that the target generates, prompt excluded.
Answers = Sequence[Sequence[int]]


class PlainAnswers:
    """What a contender, plain greedy `generate()`, says to a prompt, each recorded once."""

    def __init__(self, contender: Contender):
        self._plain = contender
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> list[list[int]]:
        """Per row of (B, L) ids the tokens that follow, each row run alone, without padding."""
        mask = torch.ones_like(ids) if mask is None else mask
        answers = []
        for row, seen in zip(ids, mask.bool(), strict=True):
            prompt = row[seen]
            key = tuple(prompt.tolist()), new_tokens
            if key not in self._known:
                alone = prompt[None]
                run = self._plain.run(alone, new_tokens, torch.ones_like(alone))
                self._known[key] = run.sequence[len(prompt) :].tolist()
            answers.append(self._known[key])
        return answers


def _knowing(model: Any, drafter_of: Callable[[Answers], Drafter], name: str) -> Contender:
    """A contender whose drafter is made from the plain answers for every generation.

    They are recorded the first time a prompt is met, which `prepare` does untimed.
    """
    answers = PlainAnswers(plain(model))

    def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        decode = partial(generate_with, drafter_of(answers(ids, new_tokens, mask)))
        return speculative(model, ids, new_tokens, mask, custom_generate=decode)

    def prepare(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> None:
        answers(ids, new_tokens, mask)

    return Contender(name, run, prepare, ours=True)


class OraclePolicy(LengthPolicy):
    """Stop after the first token that is not in the target's `answers`."""

    def __init__(self, answers: Answers, max_draft_tokens: int = sys.maxsize):
        super().__init__(max_draft_tokens)
        self.answers = answers

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Whether each token is the one that the target says there."""
        texts = [self.answers[one.row][one.position : one.position + 1] for one in newest]
        return [list(text) == [one.token] for text, one in zip(texts, newest, strict=True)]


def oracle(model: Any, draft: PreTrainedModel) -> Contender:
    """A chain of `draft`, which shares the target's vocabulary, under the oracle's policy."""

    def drafter(answers: Answers) -> Drafter:
        return DraftModelDrafter(DraftConfig(), draft, OraclePolicy(answers), num_embeddings(model))

    return _knowing(model, drafter, "oracle")


class SyntheticDrafter(Drafter):
    """Chains of `length` right tokens, each of them left as it is with probability `acceptance`."""

    def __init__(self, answers: Answers, acceptance: float, length: int, vocab_size: int):
        self.answers = answers
        self.acceptance = acceptance
        self.length = length
        self.vocab_size = vocab_size

    def start(self, state: GenerationState) -> None:
        """Make the same places wrong of the same answers in every repetition."""
        self._random = random.Random(str(self.answers))  # noqa: S311 - no secret

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """The next tokens of every unfinished row."""
        drafts = {}
        for row, limit in limits.items():
            begin = state.generated[row]
            end = begin + min(self.length, limit)
            chain = [
                token if self._random.random() < self.acceptance else (token + 1) % self.vocab_size
                for token in self.answers[row][begin:end]
            ]
            drafts[row] = [state.tokens[row][-1], *chain], list(range(-1, len(chain)))
        return DraftTree.from_drafts(drafts, state.num_rows)


def synthetic(model: Any, acceptance: float, length: int) -> Contender:
    """Chains of `length` tokens, each accepted with this probability after accepted ones."""
    vocab_size = model.config.get_text_config().vocab_size

    def drafter(answers: Answers) -> Drafter:
        return SyntheticDrafter(answers, acceptance, length, vocab_size)

    return _knowing(model, drafter, f"synthetic, {length} tokens, acceptance {acceptance:g}")
