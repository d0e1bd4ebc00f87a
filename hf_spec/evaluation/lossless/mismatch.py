"""Classification of differences between greedy outputs: a tie of two logits, or a bug.

A forward pass over a draft tree sums in another order than plain decoding, so its logits differ by
rounding. If plain decoding prefers token a and the tree token b, rounding allows a margin of a over
b of at most twice that difference. The difference is measured at the same position for several
shapes of the engine's forward pass, with one step of the dtype as its minimum. It must itself be
rounding: comparable to the difference between two plain forward passes of different shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from hf_spec.evaluation.lossless.sampling import generate_after
from hf_spec.training.responses import end_tokens

TIE, BUG, UNSTABLE = "tie", "bug", "unstable"

# Nodes of the widest forward pass tried at a difference.
CHAIN = 8
# Maximum ratio of the engine's rounding to that of plain forward passes.
ROUNDING_FACTOR = 4
# Number of largest logits compared; much smaller ones may be rounded more coarsely.
LIKELIEST = 64


@dataclass(frozen=True)
class Difference:
    """First position where an output differs from plain decoding, counted from the prompt.

    Tokens are None after the end. `margin` is the plain score of `plain_token` minus that of
    `token`. `error` is the maximum difference between plain logits and the engine's at this
    position, among the likeliest tokens; `noise` is that between two plain forward passes, over all
    generated tokens so far. `kind` is "unstable" if plain decoding is not reproducible.
    """

    position: int
    plain_token: int | None
    token: int | None
    margin: float
    error: float
    noise: float
    kind: str
    reason: str


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Return the index at which two outputs start to differ, None if they are equal."""
    pairs = zip(expected, got, strict=False)
    length = None if len(expected) == len(got) else min(len(expected), len(got))
    return next((index for index, (a, b) in enumerate(pairs) if a != b), length)


@torch.no_grad()
def differences(
    model: Any, prompt: Tensor, expected: Sequence[int], got: Sequence[int], new_tokens: int
) -> Iterator[Difference]:
    """Yield the differences between the output `got` and plain decoding.

    After a tie, plain decoding continues from the token of `got`, so that the rest of the output is
    checked too. The first bug ends the check. Both outputs consist of the (1, L) prompt and at most
    `new_tokens` tokens.
    """
    start = prompt.shape[1]
    limit = start + new_tokens
    text = prompt
    while (index := first_difference(expected, got)) is not None:
        difference = _explain(model, text, expected, got, start)
        yield difference
        if difference.kind != TIE or index + 1 >= limit:
            return
        text = torch.tensor([got[: index + 1]], device=prompt.device)
        if got[index] in end_tokens(model):
            expected = got[: index + 1]
        else:
            rest = generate_after(model, text, limit - index - 1, do_sample=False)
            expected = rest.sequences[0].tolist()


def _explain(
    model: Any, text: Tensor, expected: Sequence[int], got: Sequence[int], start: int
) -> Difference:
    index = first_difference(expected, got)
    assert index is not None, "only called for outputs that differ"
    plain, other = (seq[index] if index < len(seq) else None for seq in (expected, got))
    differ = partial(Difference, index - start, plain, other)
    if plain is None or other is None:
        longer, shorter = ("plain", "this") if other is None else ("this", "plain")
        reason = f"the {shorter} output ends where the {longer} output continues"
        return differ(float("inf"), 0.0, 0.0, BUG, reason)
    tokens = list(got[:index])
    settings = {"do_sample": False, "output_logits": True, "output_scores": True}
    repeated = generate_after(model, text, index - text.shape[1] + 1, **settings)
    if repeated.sequences[0, :index].tolist() != tokens:
        reason = "plain generate() is not reproducible: its second output differs"
        return differ(float("nan"), 0.0, 0.0, UNSTABLE, reason)
    stepwise = torch.stack([step[0].float() for step in repeated.logits])
    prefix = torch.tensor([tokens], device=text.device)
    parallel = model(prefix).logits[0, text.shape[1] - 1 :].float()
    noise = _distance(stepwise, parallel)
    last = stepwise[-1]
    shapes = _packed_logits(model, tokens, got[index : index + CHAIN - 1])
    error = max(_distance(last, logits.float()) for logits in shapes)
    scores = repeated.scores[-1][0].float()
    margin = float(scores[plain] - scores[other])
    # One step of the dtype at the magnitude of the largest finite logit.
    rounding = float(last[last.isfinite()].abs().max()) * torch.finfo(model.dtype).eps
    return differ(margin, error, noise, *_classify(margin, error, noise, rounding))


def _classify(margin: float, error: float, noise: float, rounding: float) -> tuple[str, str]:
    allowed = ROUNDING_FACTOR * max(noise, rounding)
    if not error <= allowed:
        return BUG, (
            f"the engine's logits are off by {error:.2g}, where rounding explains {allowed:.2g}"
        )
    bound = 2 * max(error, rounding)
    if margin <= bound:
        return TIE, f"margin {margin:.2g} is within twice the rounding ({bound:.2g})"
    return BUG, f"margin {margin:.2g} is more than rounding explains ({bound:.2g})"


def _distance(plain: Tensor, other: Tensor) -> float:
    """Return the maximum difference of two (..., V) logits among the largest plain ones."""
    best, indices = plain.topk(min(LIKELIEST, plain.shape[-1]), dim=-1)
    # Two -inf, as for unused token ids, are equal.
    return float((best - other.gather(-1, indices)).nan_to_num(nan=0.0).abs().max())


def _packed_logits(
    model: PreTrainedModel, tokens: Sequence[int], following: Sequence[int]
) -> list[Tensor]:
    """Return the engine's (V,) logits after `tokens` from a prefill, a root, a chain's root."""
    chain = [tokens[-1], *following]
    logits = []
    for stored, nodes in ((False, chain[:1]), (True, chain[:1]), (True, chain)):
        runner = ModelRunner(model, 1)
        with runner.active():
            if stored and len(tokens) > 1:
                runner.forward(_chain([tokens[-2]]), [tokens[:-1]])
                runner.keep([[]])
            logits.append(runner.forward(_chain(nodes), [tokens]).logits[0])
    return logits


def _chain(nodes: Sequence[int]) -> DraftTree:
    return DraftTree.from_rows([(list(nodes), list(range(-1, len(nodes) - 1)))])
