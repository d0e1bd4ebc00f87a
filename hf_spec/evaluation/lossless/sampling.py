"""Test of speculative sampling against the model's own distribution.

Many short continuations of a text are drawn with a strategy, and their counts are compared with the
probabilities of plain `generate()`. The text is a prompt and the start of the model's answer, cut
where the model is least certain about the next token. There a biased acceptance rule shows.
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
from hf_spec.evaluation.settings import SamplingPlan
from hf_spec.training.responses import end_tokens, until_end

# Rows of one plain forward pass; limits the memory of its logits.
ROWS = 16


@dataclass(frozen=True)
class SampledText:
    """Draws after one text compared with plain `generate()`, and their draft token counts."""

    comparison: Comparison
    drafted: int
    accepted: int


@dataclass(frozen=True)
class SamplingResult:
    """Test over all texts, at a significance level."""

    texts: tuple[SampledText, ...]
    significance: float

    @property
    def p_value(self) -> float:
        """Smaller p-value of the summed statistic and the worst text, for two tests."""
        comparisons = [text.comparison for text in self.texts]
        worst = min((len(comparisons) * c.p_value for c in comparisons), default=1.0)
        if any(c.impossible for c in comparisons):
            return 0.0
        summed = chi_square_tail(sum(c.statistic for c in comparisons), self.freedom)
        return min(1.0, 2 * min(worst, summed))

    @property
    def freedom(self) -> int:
        """Degrees of freedom of the summed statistic."""
        return sum(text.comparison.cells - 1 for text in self.texts)

    @property
    def draws(self) -> int:
        """Number of drawn continuations."""
        return sum(text.comparison.draws for text in self.texts)

    @property
    def detectable(self) -> float:
        """Smallest share of probability whose shift in every text is detected in 99 % of tests."""
        return detectable_share(self.draws, self.freedom, self.significance / 2)

    @property
    def passed(self) -> bool:
        """True if no bias was detected."""
        return self.p_value >= self.significance


def check_sampling(
    model: Any, prompts: Sequence[Tensor], plan: SamplingPlan, **method: Any
) -> SamplingResult:
    """Compare draws of the strategy in `method` after (1, L) prompts with plain sampling."""
    device = model.device
    # MPS cannot save and restore its generator by device.
    devices = [device] if device.type in {"cuda", "xpu"} else []
    texts = []
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(plan.seed)
        ends = end_tokens(model)
        for prompt in prompts:
            text = uncertain_text(model, prompt.to(model.device), plan.look_ahead)
            probs = plain_probs(model, text, plan)
            cells = divide(probs, plan.steps, MIN_EXPECTED / plan.draws, ends)
            drawn, drafted, accepted = draw(model, text, plan, ends, method)
            texts.append(SampledText(compare(cells, drawn), drafted, accepted))
    return SamplingResult(tuple(texts), plan.significance)


def uncertain_text(model: Any, prompt: Tensor, look_ahead: int) -> Tensor:
    """Return prompt and answer, cut where the largest next-token probability is closest to 0.5."""
    output = generate_after(model, prompt, look_ahead, do_sample=False, output_logits=True)
    best = torch.stack([step[0].float().softmax(dim=-1).max() for step in output.logits])
    length = int((best - 0.5).abs().argmin())
    return output.sequences[:, : prompt.shape[1] + length]


def plain_probs(model: Any, text: Tensor, plan: SamplingPlan) -> NextProbs:
    """Return the distributions of plain `generate()` after `text` and each path."""

    def next_probs(paths: Sequence[Path]) -> Tensor:
        following = torch.tensor(paths, dtype=torch.long, device=text.device).view(len(paths), -1)
        prefixes = torch.cat([text.expand(len(paths), -1), following], dim=1)
        settings = {"output_scores": True, **plan.options}
        parts = [generate_after(model, p, 1, **settings).scores[0] for p in prefixes.split(ROWS)]
        return torch.cat(parts).cpu().double().softmax(dim=-1)

    return next_probs


def draw(
    model: Any, text: Tensor, plan: SamplingPlan, ends: set[int], method: dict[str, Any]
) -> tuple[list[Path], int, int]:
    """Return continuations of `text` drawn by a strategy, drafted tokens and accepted tokens."""
    drawn: list[Path] = []
    drafted = accepted = 0
    while len(drawn) < plan.draws:
        rows = min(plan.rows, plan.draws - len(drawn))
        settings = {**plan.options, **method, "num_return_sequences": rows}
        output = generate_after(model, text, plan.steps, **settings)
        drafted += output.spec_stats.drafted_tokens
        accepted += output.spec_stats.accepted_tokens
        rows_drawn = output.sequences[:, text.shape[1] :].tolist()
        drawn += [tuple(until_end(row, ends)) for row in rows_drawn]
    return drawn, drafted, accepted


def generate_after(model: Any, texts: Tensor, new_tokens: int, **settings: Any) -> Any:
    """Return the full output of `generate()` for (B, L) texts without padding."""
    return model.generate(
        texts,
        attention_mask=torch.ones_like(texts),
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        **settings,
    )
