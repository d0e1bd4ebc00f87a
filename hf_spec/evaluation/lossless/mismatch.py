"""Why two greedy outputs differ: a tie of the two largest logits, or a mistake.

A forward over a draft tree adds up the same products as plain decoding in another order, so its
logits differ by rounding. Where plain decoding prefers token a and the tree token b, the margin of
a over b in the plain logits can be at most twice that difference. It is measured at the very place,
in several shapes of the engine's forward, counts for no less than one step of the dtype, and must
itself be rounding: of the size of what two plain forwards of other shape differ by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.runner import ModelRunner
from hf_spec.evaluation.lossless.sampling import continued
from hf_spec.training.responses import end_tokens

TIE, BUG, UNSTABLE = "tie", "bug", "unstable"

# Nodes of the widest forward that is tried at the place of a difference.
CHAIN = 8
# How much larger than the rounding of plain forwards that of the engine may be.
ROUNDING_FACTOR = 4
# Logits far below the largest may round more coarsely; so many of the largest are looked at.
LIKELIEST = 64


@dataclass(frozen=True)
class Difference:
    """The first place where an output leaves plain decoding.

    Attributes:
        position: of the differing token, counted from the first generated one.
        plain_token, token: what plain decoding says there and what came; None after an end.
        margin: how much larger the plain score of `plain_token` is than that of `token`.
        error: largest difference between plain logits and the engine's at this place, among the
            likeliest tokens.
        noise: the same between two plain forwards, over all generated tokens up to here.
        kind: "tie", "bug", or "unstable" where plain decoding does not repeat itself.
        reason: in words.
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
    """Where two outputs begin to differ, None if they are equal."""
    pairs = zip(expected, got, strict=False)
    length = None if len(expected) == len(got) else min(len(expected), len(got))
    return next((place for place, (a, b) in enumerate(pairs) if a != b), length)


@torch.no_grad()
def differences(
    model: Any, prompt: Tensor, expected: Sequence[int], got: Sequence[int], new_tokens: int
) -> Iterator[Difference]:
    """Explain how `got` departs from plain decoding.

    After a tie plain decoding goes on from the token that came, so that the rest of the output is
    checked too. The first mistake is the last one looked at. Both outputs have `new_tokens` at the
    most, after the (1, L) prompt that they begin with.
    """
    start = prompt.shape[1]
    limit = start + new_tokens
    text = prompt
    while (place := first_difference(expected, got)) is not None:
        difference = _explain(model, text, expected, got, place - start)
        yield difference
        if difference.kind != TIE or place + 1 >= limit:
            return
        text = torch.tensor([got[: place + 1]], device=prompt.device)
        if got[place] in end_tokens(model):
            expected = got[: place + 1]
        else:
            again = continued(model, text, limit - place - 1, do_sample=False)
            expected = again.sequences[0].tolist()


def _explain(
    model: Any, text: Tensor, expected: Sequence[int], got: Sequence[int], position: int
) -> Difference:
    place = first_difference(expected, got)
    assert place is not None, "only called for outputs that differ"
    if place >= min(len(expected), len(got)):
        longer, shorter = ("plain", "this") if len(expected) > len(got) else ("this", "plain")
        mine, theirs = (seq[place] if place < len(seq) else None for seq in (expected, got))
        reason = f"the {shorter} output ends where the {longer} one goes on"
        return Difference(position, mine, theirs, float("inf"), 0.0, 0.0, BUG, reason)
    tokens = list(got[:place])
    settings = {"do_sample": False, "output_logits": True, "output_scores": True}
    again = continued(model, text, place - text.shape[1] + 1, **settings)
    if again.sequences[0, :place].tolist() != tokens:
        reason = "plain generate() gave another output the second time"
        return Difference(
            position, expected[place], got[place], float("nan"), 0.0, 0.0, UNSTABLE, reason
        )
    stepwise = torch.stack([step[0].float() for step in again.logits])
    known = torch.tensor([tokens], device=text.device)
    whole = model(known).logits[0, text.shape[1] - 1 :].float()
    noise = _distance(stepwise, whole)
    here = stepwise[-1]
    shapes = _packed_logits(model, tokens, got[place : place + CHAIN - 1])
    error = max(_distance(here, logits.float()) for logits in shapes)
    scores = again.scores[-1][0].float()
    margin = float(scores[expected[place]] - scores[got[place]])
    kind, reason = _judge(margin, error, noise, _rounding(here, model.dtype))
    return Difference(position, expected[place], got[place], margin, error, noise, kind, reason)


def _judge(margin: float, error: float, noise: float, rounding: float) -> tuple[str, str]:
    """Tie or mistake, and why."""
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
    """Between two (..., V) logits, where the plain ones are largest."""
    best, places = plain.topk(min(LIKELIEST, plain.shape[-1]), dim=-1)
    # Where both are -inf, as of tokens that do not exist, they agree.
    return float((best - other.gather(-1, places)).nan_to_num(nan=0.0).abs().max())


def _rounding(logits: Tensor, dtype: torch.dtype) -> float:
    """One step of `dtype` at the size of the largest finite logit."""
    return float(logits[logits.isfinite()].abs().max()) * torch.finfo(dtype).eps


def _packed_logits(
    model: PreTrainedModel, tokens: Sequence[int], following: Sequence[int]
) -> list[Tensor]:
    """(V,) the engine's logits after `tokens`: in one forward, as a root, as that of a chain."""
    chain = [tokens[-1], *following]
    found = []
    for stored, nodes in ((False, chain[:1]), (True, chain[:1]), (True, chain)):
        runner = ModelRunner(model, 1)
        with runner.active():
            if stored and len(tokens) > 1:
                runner.forward(_chain([tokens[-2]]), [tokens[:-1]])
                runner.keep([[]])
            found.append(runner.forward(_chain(nodes), [tokens]).logits[0])
    return found


def _chain(nodes: Sequence[int]) -> DraftTree:
    return DraftTree.from_rows([(list(nodes), list(range(-1, len(nodes) - 1)))])
