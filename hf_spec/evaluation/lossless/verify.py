"""Proof on a user's own model and prompts that a strategy leaves the output as it is.

Greedy outputs are compared token by token with plain `generate()`; `mismatch` finds the reason of
every difference. Sampled tokens are compared with the model's own distribution (`sampling`). A
strategy passes if all differences are ties, nothing speaks against the distribution, and accepted
drafts were among what was compared: without them there was nothing that could have been wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hf_spec.common.prompts import Prompt
from hf_spec.evaluation.bench.contenders import plain, speculative
from hf_spec.evaluation.bench.entries import Entry
from hf_spec.evaluation.lossless.mismatch import TIE, Difference, differences
from hf_spec.evaluation.lossless.sampling import SamplingResult, check_sampling
from hf_spec.evaluation.lossless.settings import VerificationPlan

# Verdicts, the worst first.
VERDICTS = FAILED, UNPROVEN, PASSED = "failed", "unproven", "passed"


@dataclass(frozen=True)
class GreedyOutput:
    """One greedy output beside that of plain `generate()`.

    What follows a difference that is a tie is compared with plain decoding from there on.
    """

    prompt: str
    task: str
    new_tokens: int
    tau: float
    differences: tuple[Difference, ...]

    @property
    def mistakes(self) -> list[Difference]:
        """The differences that are no ties."""
        return [found for found in self.differences if found.kind != TIE]


@dataclass(frozen=True)
class Verification:
    """What was found about one strategy; `sampling` is None if nothing was drawn."""

    name: str
    greedy: tuple[GreedyOutput, ...]
    sampling: SamplingResult | None

    @property
    def unproven(self) -> list[str]:
        """What was compared without a single accepted draft: "greedy", "sampling"."""
        accepted = {"greedy": any(output.tau for output in self.greedy)}
        if self.sampling is not None:
            accepted["sampling"] = any(text.accepted for text in self.sampling.texts)
        return [part for part, found in accepted.items() if not found]

    @property
    def verdict(self) -> str:
        """FAILED if more than ties was found, UNPROVEN if no draft was accepted, or PASSED."""
        wrong = any(output.mistakes for output in self.greedy)
        if wrong or (self.sampling is not None and not self.sampling.passed):
            return FAILED
        return UNPROVEN if self.unproven else PASSED

    @property
    def passed(self) -> bool:
        """Whether the verdict is PASSED."""
        return self.verdict == PASSED

    def to_dict(self) -> dict[str, Any]:
        """JSON values, with what follows from them."""
        sampling = self.sampling and {
            "significance": self.sampling.significance,
            "p_value": self.sampling.p_value,
            "detectable_share": self.sampling.detectable,
            "passed": self.sampling.passed,
            "texts": [
                {**dataclasses.asdict(text), "p_value": text.comparison.p_value}
                for text in self.sampling.texts
            ],
        }
        return {
            "strategy": self.name,
            "passed": self.passed,
            "verdict": self.verdict,
            "unproven": self.unproven,
            "greedy": [dataclasses.asdict(output) for output in self.greedy],
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
    """Check every strategy on every prompt; the model is in evaluation mode.

    `progress` is called after every greedy output and every sampled strategy.
    """
    encoded = [prompt.encode(tokenizer).to(model.device) for prompt in prompts]
    shortest = sorted(encoded, key=lambda ids: ids.shape[1])[: plan.sampled_prompts]
    greedy: dict[str, list[GreedyOutput]] = {entry.name: [] for entry in entries}
    sampled: dict[str, SamplingResult] = {}
    with _plain_by_default(model):
        for prompt, ids in zip(prompts, encoded, strict=True):
            expected = plain(model).run(ids, plan.new_tokens).sequence.tolist()
            for entry in entries:
                run = speculative(model, ids, plan.new_tokens, **entry.method)
                assert run.stats is not None, "our own strategies count"
                got = run.sequence.tolist()
                output = GreedyOutput(
                    prompt.id,
                    prompt.task,
                    len(got) - ids.shape[1],
                    run.stats.tau,
                    tuple(differences(model, ids, expected, got, plan.new_tokens)),
                )
                greedy[entry.name].append(output)
                progress()
        for entry in entries if shortest else ():
            sampled[entry.name] = check_sampling(model, shortest, plan.sampling, **entry.method)
            progress()
    return [
        Verification(entry.name, tuple(greedy[entry.name]), sampled.get(entry.name))
        for entry in entries
    ]


@contextmanager
def _plain_by_default(model: Any) -> Iterator[None]:
    """A strategy that is stored with the model would make plain generate() speculate as well."""
    config, stored = model.generation_config, model.generation_config.spec_strategy
    # Named where it is None already, it would leave an entry in the config, which is saved.
    if stored is not None:
        config.spec_strategy = None
    try:
        yield
    finally:
        if stored is not None:
            config.spec_strategy = stored
