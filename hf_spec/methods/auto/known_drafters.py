"""Published draft heads and draft models by target model, from `known_drafters.json`.

The table contains what papers, READMEs and documentation name. It does not guarantee that a head
loads with the right layout or drafts well; check it with `hf-spec verify` and `hf-spec bench`. A
wrong one costs only time.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from transformers import PreTrainedModel

from hf_spec.adapters.adapter import base_name
from hf_spec.common.errors import OptionError
from hf_spec.methods.registry import known_strategies

# Name suffix of quantized copies.
QUANTIZED_SUFFIX = re.compile(
    r"-(awq|gptq|fp8|nvfp4|int4|int8|4bit|8bit|bnb|gguf|mlx|dynamic|bf16)\b.*$"
)


@dataclass(frozen=True)
class KnownDrafter:
    """Drafter on the Hub.

    Attributes:
        repo: Hub id, for `assistant=`.
        family: kind of drafter, by its common name.
        strategy: value for `spec_strategy=`.
        targets: names of supported target models, without owners.
        licence: license of the weights; "its card" if only the model card states one.
        pickled: True if it is published as a pickle, which must be converted first.
    """

    repo: str
    family: str
    strategy: str
    targets: tuple[str, ...]
    licence: str
    pickled: bool


@cache
def known_drafters() -> tuple[KnownDrafter, ...]:
    """Return the whole table."""
    text = resources.files(__package__).joinpath("known_drafters.json").read_text(encoding="utf-8")
    return tuple(
        KnownDrafter(**{**entry, "targets": tuple(entry["targets"])}) for entry in json.loads(text)
    )


def heads_for(model: PreTrainedModel | str) -> list[KnownDrafter]:
    """Return published drafters for a model or Hub id, from a built-in table without network.

    Quantized copies match the name of the original model.
    """
    if not isinstance(model, str) and not hasattr(model, "config"):
        raise OptionError(f"model of type {type(model).__name__}: pass a model or its Hub id")
    name = _base_name(model if isinstance(model, str) else base_name(model))
    strategies = known_strategies()
    return [
        drafter
        for drafter in known_drafters()
        if drafter.strategy in strategies and name in map(_base_name, drafter.targets)
    ]


def _base_name(name: str) -> str:
    """Return a model name in lower case, without owner, "meta-" and quantization suffix."""
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    return QUANTIZED_SUFFIX.sub("", last)
