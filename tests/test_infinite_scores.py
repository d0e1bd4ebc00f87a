"""Scores without a softmax: infinite ones, NaN, -inf for every token.

Plain greedy decoding takes their `argmax`, and plain sampling raises an error. Drafting applies the
same processors and must handle such scores too, for any predictions of the draft model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from torch import Tensor
from transformers import LogitsProcessor

import hf_spec
from tests import tiny_models
from tests.identity import assert_identical
from tests.tiny_models import MATRIX, VOCAB

INF, NAN = float("inf"), float("nan")
EVERY_TOKEN = list(range(VOCAB))
KINDS = ("one", "ragged")


class Now(LogitsProcessor):
    """Processor that sets the scores of some tokens to a value, in every third step."""

    def __init__(self, value: float, tokens: list[int]):
        self.value = value
        self.tokens = tokens

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.clone()
        if input_ids.shape[1] % 3 == 0:
            scores[:, self.tokens] = self.value
        return scores


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    # Processors of transformers, which drafting applies as well.
    "infinite bias": lambda: {"sequence_bias": {(5,): INF, (9,): INF}},
    "bias of no number": lambda: {"sequence_bias": {(5,): NAN}},
    "nothing allowed": lambda: {"suppress_tokens": EVERY_TOKEN},
    "infinities of both signs": lambda: {"sequence_bias": {(5,): INF, (7,): -INF}},
    # The EOS token has a score of inf, and is forbidden for some more steps.
    "decay of what is forbidden": lambda: {
        "min_new_tokens": 14,
        "eos_token_id": 96,
        "exponential_decay_length_penalty": (6, 1e18),
    },
    "decay without end": lambda: {
        "eos_token_id": [95, 96],
        "exponential_decay_length_penalty": (6, 1e18),
    },
    "infinities removed": lambda: {
        "sequence_bias": {(5,): INF, (7,): -INF},
        "remove_invalid_values": True,
        "exponential_decay_length_penalty": (2, 1e30),
        "eos_token_id": [5, 96],
    },
    # User-defined processors.
    "own, infinite": lambda: {"logits_processor": [Now(INF, [5, 9])]},
    "own, no number": lambda: {"logits_processor": [Now(NAN, [5, 9])]},
    "own, nothing allowed": lambda: {"logits_processor": [Now(-INF, EVERY_TOKEN)]},
}


@cache
def plain(kind: str, option: str) -> Tensor:
    return tiny_models.build("llama").generate(
        **tiny_models.prompts("llama", kind),
        max_new_tokens=16,
        do_sample=False,
        **OPTIONS[option](),
    )


@pytest.mark.by_default(strategy=("tree",))
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("strategy", MATRIX)
def test_greedy_tokens_are_those_of_plain_decoding(strategy: str, option: str) -> None:
    for kind in KINDS:
        call = {
            **tiny_models.prompts("llama", kind),
            "max_new_tokens": 16,
            "do_sample": False,
            **OPTIONS[option](),
            **tiny_models.speculation("llama", strategy),
        }
        model = tiny_models.build("llama")
        assert_identical(model, call, model.generate(**call), plain(kind, option))


@pytest.mark.parametrize("strategy", ["draft", "tree", "gsd"])
def test_a_draft_model_whose_scores_are_no_numbers(strategy: str) -> None:
    """The target's scores stay finite, so plain sampling raises no error."""
    model = tiny_models.build("llama")
    broken = hf_spec.truncated_draft(model, 1)
    call = {**tiny_models.prompts("llama", "ragged"), "max_new_tokens": 9}

    def spoil(module: Any, inputs: Any, output: Any) -> None:
        output.logits[..., 5:7] = NAN

    with broken.register_forward_hook(spoil):
        for choice in ({"do_sample": False}, {"do_sample": True, "top_k": 1}):
            drafted = {**call, **choice, "spec_strategy": strategy, "assistant": broken}
            expected = model.generate(**call, do_sample=False)
            assert_identical(model, drafted, model.generate(**drafted), expected)


@pytest.mark.parametrize("strategy", MATRIX)
def test_sampling_raises_the_error_of_plain_sampling(strategy: str) -> None:
    model = tiny_models.build("llama")
    call = {**tiny_models.prompts("llama", "one"), "max_new_tokens": 9, "do_sample": True}
    for more in ({}, tiny_models.speculation("llama", strategy)):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            model.generate(**call, logits_processor=[Now(INF, [5, 9])], **more)
