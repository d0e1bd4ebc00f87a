"""One benchmark: every contender on every prompt and batch size, in one process, and its results.

Results are a JSON-ready dictionary; `hf_spec.evaluation.bench.report` and
`hf_spec.evaluation.bench.plots` turn it into tables and plots.
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
from hf_spec.evaluation.bench import contenders as ways
from hf_spec.evaluation.bench.contenders import Contender, Settings
from hf_spec.evaluation.bench.entries import Entry, found_entry
from hf_spec.evaluation.bench.known_answers import PlainAnswers, oracle, synthetic
from hf_spec.evaluation.bench.profiling import profiled
from hf_spec.evaluation.bench.runner import Plan, Record, time_contenders
from hf_spec.evaluation.bench.settings import Suite
from hf_spec.evaluation.bench.step_cost import measure_step_cost
from hf_spec.evaluation.bench.summary import summary
from hf_spec.methods.draft_model.loading import read_draft_model, resolve_draft_model
from hf_spec.methods.draft_model.trained import METHOD as DRAFT
from hf_spec.methods.loading import find_assistant
from hf_spec.training.responses import end_tokens

# Tokens before the root where the cost of a forward is measured.
STEP_COST_CONTEXT = 200
PROFILED_BATCHES = 6


@dataclass
class Results:
    """What has been measured so far, and how and where.

    Profiles are seconds by part of a step, one entry per batch size and contender; the step cost is
    seconds of each repetition by form of the forward and number of nodes.
    """

    facts: dict[str, Any]
    records: list[Record] = field(default_factory=list)
    profiles: list[dict[str, Any]] = field(default_factory=list)
    step_cost: dict[str, dict[int, list[float]]] = field(default_factory=dict)

    def to_dict(self, **facts: Any) -> dict[str, Any]:
        """JSON values, with whatever else is given."""
        return {
            **facts,
            **self.facts,
            "summary": summary(self.records),
            "profiles": self.profiles,
            "step_cost": self.step_cost,
            "records": [record.to_dict() for record in self.records],
        }


class Benchmark:
    """A suite on one model in evaluation mode; a strategy stored with it is taken off.

    Strategies are `entries`, and `settings` are what else `generate()` is given.

    Attributes:
        prompts: one per output; of conversations one per turn.
        contenders: what is measured, the reference first.

    Raises:
        SpecError: if something cannot be measured.
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
        """Timed generations in all."""
        return sum(
            math.ceil(len(self.prompts) / size) * len(self._of_size(size)) * self.suite.repeats
            for size in set(self.suite.batch_sizes)
        )

    def run(self, progress: Callable[[], object] = lambda: None) -> Iterator[Results]:
        """Measure everything; `progress` is called after every timed generation.

        Yields:
            The same results again and again, with every batch more of them.
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
        for size in sorted(set(suite.batch_sizes)):
            seed = suite.seed if suite.sample else None
            ends, device = frozenset(end_tokens(self.model)), self.model.device
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
        """Seconds by part of a step, for each contender that runs in our engine."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        batches = make_batches(self.prompts, self.tokenizer, plan.batch_size)
        # Shares of a step settle soon: a few batches, spread over the tasks, are enough.
        for batch in batches[:: math.ceil(len(batches) / PROFILED_BATCHES)]:
            for contender in contenders:
                if contender.ours:
                    if plan.seed is not None:
                        torch.manual_seed(plan.seed)
                    with profiled() as seconds:
                        contender.run(batch.ids, plan.new_tokens, batch.mask)
                    found[contender.name].update(seconds)
        return [
            {"batch_size": plan.batch_size, "contender": name, "seconds": dict(parts)}
            for name, parts in found.items()
        ]

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"do_sample": self.suite.sample}
        if self.suite.sample:
            settings["temperature"] = self.suite.temperature or 1.0
        pad = self.model.generation_config.pad_token_id
        if pad is None:
            pad = self.tokenizer.pad_token_id
        # Without one generate() takes the end of a sequence, and warns at every call.
        settings["pad_token_id"] = min(end_tokens(self.model), default=0) if pad is None else pad
        return settings

    def _turns(self, prompts: Sequence[Prompt], settings: Settings) -> list[Prompt]:
        """One prompt per turn, after the model's own greedy answers to the turns before."""
        answers = PlainAnswers(ways.plain(self.model, {**settings, "do_sample": False}))

        def answer(prompt: Prompt) -> str:
            output = answers(prompt.encode(self.tokenizer), self.suite.new_tokens)[0]
            return str(self.tokenizer.decode(output, skip_special_tokens=True)).strip()

        return as_conversations(prompts, self.tokenizer, answer)


def make_contenders(
    model: PreTrainedModel, entries: Sequence[Entry], suite: Suite, settings: Settings
) -> list[Contender]:
    """Plain generate first, then what others offer, then ours.

    Raises:
        SpecError: if an assistant cannot be used, two entries are the same, or compiling fails.
    """
    check_model(model)
    # An adapter that does not fit is refused here, not when its turn comes.
    ours = [found_entry(entry, model) for entry in entries]
    found: list[Contender | None] = [ways.plain(model, settings)]
    if suite.compiled:
        found.append(ways.compiled(model, settings))
    if suite.baselines:
        lengths = suite.match_length, suite.copy_length
        names = ("max_matching_ngram_size", "prompt_lookup_num_tokens")
        others: dict[str, Any] = {"transformers lookup": dict(zip(names, lengths, strict=True))}
        for name, draft in _draft_models(model, ours).items():
            others[name] = {"assistant_model": draft}
        found += [
            ways.transformers(name, model, {**settings, **given}, batches=False)
            for name, given in others.items()
        ]
        if not suite.sample:
            found.append(ways.economize_lookup(model, *lengths))
    found += [
        ways.strategy(model, config, assistant, name, settings) for name, config, assistant in ours
    ]
    if suite.synthetic_acceptance is not None:
        found.append(synthetic(model, suite.synthetic_acceptance, suite.synthetic_length))
    if suite.oracle is not None:
        draft = find_assistant(suite.oracle, model, (DRAFT,))
        found.append(oracle(model, resolve_draft_model("oracle", draft, model)))
    contenders = [contender for contender in found if contender is not None]
    for name, count in Counter(contender.name for contender in contenders).items():
        if count > 1:
            raise OptionError(f"--strategy {name} is given {count} times")
    return contenders


def _draft_models(model: PreTrainedModel, entries: Sequence[Entry]) -> dict[str, PreTrainedModel]:
    """Every draft model that an entry has and transformers takes, once, by its baseline's name."""
    found: dict[int, PreTrainedModel] = {}
    for _, config, assistant in entries:
        # Transformers' own assisted decoding takes draft models alone.
        if config.adapter_methods == (DRAFT,):
            draft = read_draft_model(config.strategy, assistant, model)
            # Another size needs both tokenizers there, and goes through text.
            if num_embeddings(draft) == num_embeddings(model):
                found.setdefault(id(draft), draft)
    return {
        "transformers assistant" + (f" {number}" if number > 1 else ""): draft
        for number, draft in enumerate(found.values(), start=1)
    }
