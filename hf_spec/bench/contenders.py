"""What can be measured: plain generate, the lookups of others, and our strategies."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.outputs import SpecStats
from hf_spec.strategies import StrategyConfig, parse_strategy

# How a command line names a strategy; see `parse_entry`.
ENTRY = "NAME[:OPTION=JSON,...][@ASSISTANT]"


@dataclass(frozen=True)
class Run:
    """Outcome of one generation.

    Attributes:
        sequence: (L,) int64, prompt included.
        target_forwards: forward passes of the target model; None where they cannot be counted.
        stats: our own statistics, for our own strategies.
    """

    sequence: Tensor
    target_forwards: int | None = None
    stats: SpecStats | None = None


@dataclass(frozen=True)
class Contender:
    """A named way to generate.

    Attributes:
        name: as it appears in tables.
        run: called with (1, L) ids and a number of new tokens.
        count: like `run`, untimed, when counting forwards needs another call; None otherwise.
    """

    name: str
    run: Callable[[Tensor, int], Run]
    count: Callable[[Tensor, int], int] | None = None


def plain(model: PreTrainedModel) -> Contender:
    """`generate()` itself, greedy."""
    return Contender("plain", lambda ids, new: _counted(model, ids, max_new_tokens=new))


def transformers_lookup(model: PreTrainedModel, match_length: int, copy_length: int) -> Contender:
    """The prompt lookup of transformers."""
    return Contender(
        "transformers lookup",
        lambda ids, new: _counted(
            model,
            ids,
            max_new_tokens=new,
            prompt_lookup_num_tokens=copy_length,
            max_matching_ngram_size=match_length,
        ),
    )


def transformers_assistant(model: PreTrainedModel, assistant: PreTrainedModel) -> Contender:
    """The assisted decoding of transformers."""
    return Contender(
        "transformers assistant",
        lambda ids, new: _counted(model, ids, max_new_tokens=new, assistant_model=assistant),
    )


def economize_lookup(
    model: PreTrainedModel, match_length: int, copy_length: int
) -> Contender | None:
    """The lookup of the package `economize`; None if it is not installed."""
    if importlib.util.find_spec("economize") is None:
        return None
    import economize
    from economize.techniques.lookup import LookupConfig

    wrapped = economize.apply(
        model,
        LookupConfig(max_ngram=match_length),
        decoding=economize.DecodeConfig(cycle_length=copy_length + 1),
    )

    def run(ids: Tensor, new_tokens: int) -> Run:
        return Run(wrapped.generate(ids, max_new_tokens=new_tokens, do_sample=False)[0])

    def count(ids: Tensor, new_tokens: int) -> int:
        return int(wrapped.decode(ids[0], new_tokens).cost_summary()["exact_calls"])

    return Contender("economize lookup", run, count)


def strategy(
    model: Any, config: StrategyConfig, assistant: Any = None, name: str | None = None
) -> Contender:
    """One of our strategies."""

    def run(ids: Tensor, new_tokens: int) -> Run:
        return speculative(model, ids, new_tokens, spec_strategy=config, assistant=assistant)

    return Contender(name or config.strategy, run)


def speculative(model: Any, ids: Tensor, new_tokens: int, **method: Any) -> Run:
    """One greedy generation by our engine.

    Args:
        model: the target.
        ids: (1, L) int64.
        new_tokens: most tokens generated.
        **method: what makes `generate()` speculate.
    """
    output = model.generate(
        ids.to(model.device),
        max_new_tokens=new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        **method,
    )
    stats = output.spec_stats
    return Run(output.sequences[0], stats.target_forwards, stats)


def parse_entry(text: str) -> tuple[str, StrategyConfig, str | None]:
    """Turn NAME[:OPTION=JSON,...][@ASSISTANT] into a name for tables, a config and an assistant.

    Raises:
        OptionError: for an unknown strategy or option.
    """
    head, _, assistant = text.partition("@")
    name, _, given = head.partition(":")
    options: dict[str, Any] = {"strategy": name}
    for pair in filter(None, _split(given)):
        key, _, value = pair.partition("=")
        try:
            options[key] = json.loads(value)
        except ValueError:
            options[key] = value
    return text, parse_strategy(options), assistant or None


def _split(text: str) -> list[str]:
    """The parts between commas that stand in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[{") - (letter in "]}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def _counted(model: Any, ids: Tensor, **options: Any) -> Run:
    forwards = 0

    def count(*_: Any) -> None:
        nonlocal forwards
        forwards += 1

    handle = model.register_forward_pre_hook(count)
    try:
        sequence = model.generate(ids.to(model.device), do_sample=False, **options)[0]
    finally:
        handle.remove()
    return Run(sequence, forwards)
