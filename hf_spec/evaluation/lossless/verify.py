"""Verification on a user's model and prompts that a strategy does not change the output.

Greedy outputs are compared with plain `generate()` token by token; `mismatch` classifies every
difference. Sampled tokens are compared with the model's own distribution (`sampling`). A strategy
passes if all differences are ties, no bias is detected, and the compared outputs contain accepted
drafts, without which nothing was tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_spec.common.prompts import Prompt
from hf_spec.evaluation.bench.contenders import plain, speculative, without_stored_strategy
from hf_spec.evaluation.lossless.mismatch import TIE, Difference, differences
from hf_spec.evaluation.lossless.sampling import SamplingResult, check_sampling
from hf_spec.evaluation.settings import VerificationPlan
from hf_spec.methods.entries import Entry

# Verdicts, worst first.
VERDICTS = FAILED, UNPROVEN, PASSED = "failed", "unproven", "passed"


@dataclass(frozen=True)
class GreedyOutput:
    """One greedy output with its differences from plain `generate()`; see `differences`."""

    prompt: str
    task: str
    new_tokens: int
    tau: float
    differences: tuple[Difference, ...]

    @property
    def mistakes(self) -> list[Difference]:
        """Differences other than ties."""
        return [difference for difference in self.differences if difference.kind != TIE]


@dataclass(frozen=True)
class Verification:
    """Result for one strategy; `sampling` is None if nothing was sampled."""

    name: str
    greedy: tuple[GreedyOutput, ...]
    sampling: SamplingResult | None

    @property
    def unproven(self) -> list[str]:
        """Parts ("greedy", "sampling") without a single accepted draft."""
        accepted = {"greedy": any(output.tau for output in self.greedy)}
        if self.sampling is not None:
            accepted["sampling"] = any(text.accepted for text in self.sampling.texts)
        return [part for part, any_accepted in accepted.items() if not any_accepted]

    @property
    def verdict(self) -> str:
        """FAILED for any mistake or bias, UNPROVEN without accepted drafts, otherwise PASSED."""
        wrong = any(output.mistakes for output in self.greedy)
        if wrong or (self.sampling is not None and not self.sampling.passed):
            return FAILED
        return UNPROVEN if self.unproven else PASSED

    @property
    def passed(self) -> bool:
        """True if the verdict is PASSED."""
        return self.verdict == PASSED

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, including the verdict."""
        sampling = self.sampling and {
            "significance": self.sampling.significance,
            "p_value": self.sampling.p_value,
            "detectable_share": self.sampling.detectable,
            "passed": self.sampling.passed,
            "texts": [
                {**asdict(text), "p_value": text.comparison.p_value} for text in self.sampling.texts
            ],
        }
        return {
            "strategy": self.name,
            "passed": self.passed,
            "verdict": self.verdict,
            "unproven": self.unproven,
            "greedy": list(map(asdict, self.greedy)),
            "sampling": sampling,
        }


def verify(
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    entries: Sequence[Entry],
    plan: VerificationPlan,
    progress: Callable[[], None] = lambda: None,
) -> list[Verification]:
    """Verify every strategy on every prompt; the model is in evaluation mode.

    `progress` is called after every greedy output and every sampled strategy.
    """
    encoded = [prompt.encode(tokenizer).to(model.device) for prompt in prompts]
    shortest = sorted(encoded, key=lambda ids: ids.shape[1])[: plan.sampled_prompts]
    greedy: dict[str, list[GreedyOutput]] = {entry.name: [] for entry in entries}
    sampled: dict[str, SamplingResult] = {}
    with without_stored_strategy(model):
        for prompt, ids in zip(prompts, encoded, strict=True):
            expected = plain(model).run(ids, plan.new_tokens).sequence.tolist()
            for entry in entries:
                run = speculative(model, ids, plan.new_tokens, **entry.method)
                assert run.stats is not None, "our strategies return statistics"
                got = run.sequence.tolist()
                new, tau = len(got) - ids.shape[1], run.stats.tau
                found = tuple(differences(model, ids, expected, got, plan.new_tokens))
                greedy[entry.name].append(GreedyOutput(prompt.id, prompt.task, new, tau, found))
                progress()
        for entry in entries if shortest else ():
            method = entry.for_short_texts.method
            sampled[entry.name] = check_sampling(model, shortest, plan.sampling, **method)
            progress()
    return [
        Verification(entry.name, tuple(greedy[entry.name]), sampled.get(entry.name))
        for entry in entries
    ]
