"""Who takes part in a benchmark: plain generate, what others offer, our strategies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedModel

from hf_spec.bench import contenders as ways
from hf_spec.bench.contenders import Contender, Settings
from hf_spec.bench.entries import Entry, assistant_finder
from hf_spec.bench.known_answers import oracle, synthetic
from hf_spec.bench.settings import Suite
from hf_spec.errors import OptionError
from hf_spec.execution.model_checks import check_model
from hf_spec.execution.vocabulary import num_embeddings
from hf_spec.models.trained_draft import METHOD as DRAFT
from hf_spec.strategies.assistants import resolve_draft_model
from hf_spec.strategies.registry import make_drafter


def make_contenders(
    model: PreTrainedModel, entries: Sequence[Entry], suite: Suite, settings: Settings
) -> list[Contender]:
    """Plain generate first, then what others offer, then ours.

    Raises:
        SpecError: if an assistant cannot be used, two entries are the same, or compiling fails.
    """
    check_model(model)
    find = assistant_finder(model)
    ours = [Entry(one.short_name, one.config, find(one.assistant)) for one in entries]
    for entry in ours:
        # An adapter that does not fit is refused here, not when its turn comes.
        make_drafter(entry.config, model, entry.assistant)
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
        found.append(oracle(model, resolve_draft_model("oracle", find(suite.oracle), model)))
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
            draft = resolve_draft_model(config.strategy, assistant, model)
            # Another size needs both tokenizers there, and goes through text.
            if num_embeddings(draft) == num_embeddings(model):
                found.setdefault(id(draft), draft)
    return {
        "transformers assistant" + (f" {number}" if number > 1 else ""): draft
        for number, draft in enumerate(found.values(), start=1)
    }
