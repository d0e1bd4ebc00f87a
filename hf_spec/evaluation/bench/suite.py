"""Benchmark of every contender on every prompt and batch size in one process.

The results are JSON values; `hf_spec.evaluation.bench.report` and `hf_spec.evaluation.bench.plots`
make tables and plots of them.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_spec.common.errors import OptionError
from hf_spec.common.machine import environment
from hf_spec.common.prompts import Prompt, as_conversations, check_batch_size, make_batches
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.engine.models.support_checks import check_model
from hf_spec.evaluation.bench.contenders import (
    BaselineOutputs,
    Contender,
    Settings,
    compiled,
    economize_lookup,
    oracle,
    plain,
    strategy,
    synthetic,
    transformers,
)
from hf_spec.evaluation.bench.profiling import measure_step_cost, profiled
from hf_spec.evaluation.bench.runner import Plan, Record, time_contenders
from hf_spec.evaluation.bench.summary import summary
from hf_spec.evaluation.settings import Suite
from hf_spec.methods.draft_model.loading import read_draft_model, resolve_draft_model
from hf_spec.methods.draft_model.trained import METHOD as DRAFT
from hf_spec.methods.entries import Entry, resolve_entry
from hf_spec.methods.loading import find_assistant
from hf_spec.training.responses import end_tokens

# Context length at which the cost of a forward pass is measured.
STEP_COST_CONTEXT = 200
PROFILED_BATCHES = 6


@dataclass
class Results:
    """Measurements so far, with facts about the setup.

    `profiles` has the seconds by part of a step, one entry per batch size and contender;
    `step_cost` is the result of `measure_step_cost`.
    """

    facts: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    profiles: list[dict[str, Any]] = field(default_factory=list)
    step_cost: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    def to_dict(self, **facts: Any) -> dict[str, Any]:
        """Return JSON values, with further `facts`."""
        return {
            **facts,
            **self.facts,
            "summary": summary(self.records),
            "profiles": self.profiles,
            "step_cost": self.step_cost,
            "records": [record.to_dict() for record in self.records],
        }


class Benchmark:
    """Suite on one model in evaluation mode; a strategy stored in its generation config is removed.

    `entries` are the strategies, `settings` are further arguments of `generate()`. `prompts` has
    one entry per output, conversations have one per turn; `contenders` has the reference first. An
    unsupported contender or batch size raises `SpecError`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        prompts: Sequence[Prompt],
        entries: Sequence[Entry],
        suite: Suite,
        **settings: Any,
    ):
        self.model, self.tokenizer, self.suite = model, tokenizer, suite
        num_prompts = sum(len(p.turns) if suite.multi_turn else 1 for p in prompts)
        check_batch_size(max(suite.batch_sizes), num_prompts)
        config: Any = model.generation_config
        if config.spec_strategy is not None:
            config.spec_strategy = None
        settings = {**self._settings(), **settings}
        self.contenders = make_contenders(model, entries, suite, settings)
        self.prompts = self._turns(prompts, settings) if suite.multi_turn else list(prompts)

    @property
    def num_runs(self) -> int:
        """Total number of timed generations."""
        return sum(
            math.ceil(len(self.prompts) / size) * len(self._of_size(size)) * self.suite.repeats
            for size in set(self.suite.batch_sizes)
        )

    def run(self, progress: Callable[[], object] = lambda: None) -> Iterator[Results]:
        """Run all measurements; yield the same `Results` object after every batch.

        `progress` is called after every timed generation.
        """
        suite = self.suite
        results = Results(
            {
                "dtype": str(self.model.dtype).removeprefix("torch."),
                "synthetic_acceptance": suite.synthetic_acceptance,
                "prompts": len(self.prompts),
                "suite": asdict(suite),
                "environment": environment(self.model.device),
            }
        )
        seed = suite.seed if suite.sample else None
        ends, device = frozenset(end_tokens(self.model)), self.model.device
        for size in sorted(set(suite.batch_sizes)):
            plan = Plan(suite.new_tokens, suite.repeats, size, seed, ends, device)
            contenders = self._of_size(size)
            for newest in time_contenders(contenders, self.prompts, self.tokenizer, plan, progress):
                results.records += newest
                yield results
            if suite.profile:
                results.profiles += self._profile(contenders, plan)
                yield results
        if suite.step_cost:
            text = [t for p in self.prompts for t in p.encode(self.tokenizer)[0].tolist()]
            context = (text * STEP_COST_CONTEXT)[:STEP_COST_CONTEXT]
            results.step_cost = measure_step_cost(self.model, context, suite.repeats)
            yield results

    def _of_size(self, size: int) -> list[Contender]:
        return [contender for contender in self.contenders if size == 1 or contender.batches]

    def _profile(self, contenders: Sequence[Contender], plan: Plan) -> list[dict[str, Any]]:
        totals: dict[str, Counter[str]] = defaultdict(Counter)
        batches = make_batches(self.prompts, self.tokenizer, plan.batch_size)
        # Shares of a step vary little: a few batches, spread over the tasks, are enough.
        for batch in batches[:: math.ceil(len(batches) / PROFILED_BATCHES)]:
            for contender in (contender for contender in contenders if contender.ours):
                if plan.seed is not None:
                    torch.manual_seed(plan.seed)
                with profiled() as seconds:
                    contender.run(batch.ids, plan.new_tokens, batch.mask)
                totals[contender.name].update(seconds)
        return [
            {"batch_size": plan.batch_size, "contender": name, "seconds": dict(parts)}
            for name, parts in totals.items()
        ]

    def _settings(self) -> dict[str, Any]:
        pads = self.model.generation_config.pad_token_id, self.tokenizer.pad_token_id
        # Without a padding token generate() uses the end of a sequence and warns at every call.
        ends = min(end_tokens(self.model), default=0)
        pad = next((pad for pad in pads if pad is not None), ends)
        settings: dict[str, Any] = {"do_sample": self.suite.sample, "pad_token_id": pad}
        if self.suite.sample:
            settings["temperature"] = self.suite.temperature or 1.0
            cuts = {"top_k": self.suite.top_k, "top_p": self.suite.top_p}
            settings |= {name: value for name, value in cuts.items() if value is not None}
        return settings

    def _turns(self, prompts: Sequence[Prompt], settings: Settings) -> list[Prompt]:
        """Return one prompt per turn, after the model's greedy answers to earlier turns."""
        baseline = BaselineOutputs(plain(self.model, {**settings, "do_sample": False}))

        def answer(prompt: Prompt) -> str:
            output = baseline(prompt.encode(self.tokenizer), self.suite.new_tokens)[0]
            return str(self.tokenizer.decode(output, skip_special_tokens=True)).strip()

        return as_conversations(prompts, self.tokenizer, answer)


def make_contenders(
    model: PreTrainedModel, entries: Sequence[Entry], suite: Suite, settings: Settings
) -> list[Contender]:
    """Return plain `generate()`, other implementations, then our strategies.

    Raises `SpecError` if an assistant cannot be used, two names are equal, or compilation fails.
    """
    check_model(model)
    # An unsuitable adapter raises here, before the first measurement.
    ours = [resolve_entry(entry, model) for entry in entries]
    contenders = [plain(model, settings)]
    if suite.compiled:
        contenders.append(compiled(model, settings))
    if suite.baselines:
        contenders += _other_implementations(model, ours, suite, settings)
    contenders += [
        strategy(model, config, assistant, name, settings) for name, config, assistant in ours
    ]
    if suite.synthetic_acceptance is not None:
        contenders.append(synthetic(model, suite.synthetic_acceptance, suite.synthetic_length))
    if suite.oracle is not None:
        draft = find_assistant(suite.oracle, model, (DRAFT,))
        contenders.append(oracle(model, resolve_draft_model("oracle", draft, model)))
    for name, count in Counter(contender.name for contender in contenders).items():
        if count > 1:
            raise OptionError(f"--strategy {name} is given {count} times")
    return contenders


def _other_implementations(
    model: PreTrainedModel, entries: Sequence[Entry], suite: Suite, settings: Settings
) -> list[Contender]:
    """Return the lookups of others, and transformers' assisted decoding with our draft models."""
    options = {
        "max_matching_ngram_size": suite.match_length,
        "prompt_lookup_num_tokens": suite.copy_length,
    }
    lookup = transformers("transformers lookup", model, {**settings, **options}, batches=False)
    contenders, drafts = [lookup], dict[int, PreTrainedModel]()
    for _, config, assistant in entries:
        # Assisted decoding of transformers supports only draft models.
        if config.adapter_methods == (DRAFT,):
            draft = read_draft_model(config.strategy, assistant, model)
            # For another vocabulary it needs both tokenizers and goes through text.
            if num_embeddings(draft) == num_embeddings(model):
                drafts.setdefault(id(draft), draft)
    for number, draft in enumerate(drafts.values(), start=1):
        name = "transformers assistant" + (f" {number}" if number > 1 else "")
        assisted = {**settings, "assistant_model": draft}
        contenders.append(transformers(name, model, assisted, batches=False))
    if not suite.sample:
        economize = economize_lookup(model, suite.match_length, suite.copy_length)
        contenders += [] if economize is None else [economize]
    return contenders
