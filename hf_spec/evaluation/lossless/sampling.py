"""Whether speculative sampling follows the model's own distribution, on the model's own texts.

Many short continuations of one text are drawn with a strategy, all of the same few tokens, and
counted against probabilities that plain `generate()` gives for each of them. The text is a prompt
with a piece of the model's answer, up to the place where the model is least sure how to go on:
there a draft is sometimes right and sometimes wrong, which is what a biased rule must show at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_spec.evaluation.lossless.distribution import (
    MIN_EXPECTED,
    Comparison,
    NextProbs,
    Path,
    chi_square_tail,
    compare,
    detectable_share,
    divide,
)
from hf_spec.evaluation.lossless.settings import SamplingPlan
from hf_spec.training.responses import end_tokens

# Rows of one plain forward; bounds its logits.
ROWS = 16


@dataclass(frozen=True)
class SampledText:
    """The draws after one text beside the distribution of plain generate(), and their drafts."""

    comparison: Comparison
    drafted: int
    accepted: int


@dataclass(frozen=True)
class SamplingResult:
    """All texts together, tested with a significance."""

    texts: tuple[SampledText, ...]
    significance: float

    @property
    def p_value(self) -> float:
        """Of the sum of all statistics and of the worst text, whichever is worse, for two tests."""
        found = [text.comparison for text in self.texts]
        worst = min((len(found) * one.p_value for one in found), default=1.0)
        if any(one.impossible for one in found):
            return 0.0
        both = chi_square_tail(sum(one.statistic for one in found), self.freedom)
        return min(1.0, 2 * min(worst, both))

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the summed statistic."""
        return sum(text.comparison.cells - 1 for text in self.texts)

    @property
    def draws(self) -> int:
        """Continuations drawn."""
        return sum(text.comparison.draws for text in self.texts)

    @property
    def detectable(self) -> float:
        """Share of probability that no bias can move in every text without being found, 99 %."""
        return detectable_share(self.draws, self.freedom, self.significance / 2)

    @property
    def passed(self) -> bool:
        """Whether there is no sign of a bias."""
        return self.p_value >= self.significance


def check_sampling(
    model: Any, prompts: Sequence[Tensor], plan: SamplingPlan, **method: Any
) -> SamplingResult:
    """Compare what is drawn by `method` after (1, L) prompts with the model's own distribution."""
    devices = [model.device] if model.device.type == "cuda" else []
    found = []
    with torch.random.fork_rng(devices):
        torch.manual_seed(plan.seed)
        ends = end_tokens(model)
        for prompt in prompts:
            text = unsure_text(model, prompt.to(model.device), plan.look_ahead)
            probs = plain_probs(model, text, plan)
            cells = divide(probs, plan.steps, MIN_EXPECTED / plan.draws, ends)
            drawn, drafted, accepted = draw(model, text, plan, ends, method)
            found.append(SampledText(compare(cells, drawn), drafted, accepted))
    return SamplingResult(tuple(found), plan.significance)


def unsure_text(model: Any, prompt: Tensor, look_ahead: int) -> Tensor:
    """The prompt and the answer up to where the likeliest next token is nearest to one half."""
    output = continued(model, prompt, look_ahead, do_sample=False, output_logits=True)
    best = torch.stack([step[0].float().softmax(dim=-1).max() for step in output.logits])
    place = int((best - 0.5).abs().argmin())
    return output.sequences[:, : prompt.shape[1] + place]


def plain_probs(model: Any, text: Tensor, plan: SamplingPlan) -> NextProbs:
    """What plain `generate()` draws from after `text` and each path."""

    def next_probs(paths: Sequence[Path]) -> Tensor:
        following = torch.tensor(paths, dtype=torch.long, device=text.device).view(len(paths), -1)
        prefixes = torch.cat([text.expand(len(paths), -1), following], dim=1)
        parts = [
            continued(model, part, 1, output_scores=True, **plan.options).scores[0]
            for part in prefixes.split(ROWS)
        ]
        return torch.cat(parts).double().softmax(dim=-1).cpu()

    return next_probs


def draw(
    model: Any, text: Tensor, plan: SamplingPlan, ends: set[int], method: dict[str, Any]
) -> tuple[list[Path], int, int]:
    """Continuations of `text` that a strategy draws; draft tokens sent, and accepted."""
    drawn: list[Path] = []
    drafted = accepted = 0
    while len(drawn) < plan.draws:
        rows = min(plan.rows, plan.draws - len(drawn))
        settings = {**plan.options, **method, "num_return_sequences": rows}
        output = continued(model, text, plan.steps, **settings)
        drafted += output.spec_stats.drafted_tokens
        accepted += output.spec_stats.accepted_tokens
        drawn += [_cut(row, ends) for row in output.sequences[:, text.shape[1] :].tolist()]
    return drawn, drafted, accepted


def continued(model: Any, texts: Tensor, new_tokens: int, **settings: Any) -> Any:
    """All that `generate()` returns for (B, L) texts without padding."""
    return model.generate(
        texts,
        attention_mask=torch.ones_like(texts),
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        **settings,
    )


def _cut(tokens: list[int], ends: set[int]) -> Path:
    end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
    return tuple(tokens[: end + 1])
