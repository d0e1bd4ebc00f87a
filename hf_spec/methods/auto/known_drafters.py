"""Published drafters of others, by the model that they draft for.

The table, `known_drafters.json`, has what papers, READMEs and documentation name. A drafter that
fits by name can still be read wrongly or draft badly, which costs time alone: `hf-spec verify` and
`hf-spec bench` tell.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from transformers import PreTrainedModel

from hf_spec.adapters.base_name import base_name
from hf_spec.common.errors import OptionError
from hf_spec.methods.registry import known_strategies

# What names of quantised copies end in.
QUANTISED = re.compile(r"-(awq|gptq|fp8|nvfp4|int4|int8|4bit|8bit|bnb|gguf|mlx|dynamic|bf16)\b.*$")


@dataclass(frozen=True)
class KnownDrafter:
    """A drafter on the Hub.

    Attributes:
        repo: its Hub id, for `assistant=`.
        family: what it is, by the field's name.
        strategy: for `spec_strategy=`.
        targets: names of the models that it drafts for, without their owners.
        licence: of its weights; "its card" where the repository's card alone says it.
        pickled: whether it is published as a pickle, which has to be converted first.
    """

    repo: str
    family: str
    strategy: str
    targets: tuple[str, ...]
    licence: str
    pickled: bool


@cache
def known_drafters() -> tuple[KnownDrafter, ...]:
    """The whole table."""
    text = resources.files(__package__).joinpath("known_drafters.json").read_text(encoding="utf-8")
    return tuple(
        KnownDrafter(**{**entry, "targets": tuple(entry["targets"])}) for entry in json.loads(text)
    )


def heads_for(model: PreTrainedModel | str) -> list[KnownDrafter]:
    """Published drafters for a model, or for its Hub id; none where none is known.

    Quantised copies are found by their original's name. Nothing is asked of the Hub.
    """
    if not isinstance(model, str) and not hasattr(model, "config"):
        raise OptionError(f"model of type {type(model).__name__}: pass a model or its Hub id")
    name = _plain(model if isinstance(model, str) else base_name(model))
    served = known_strategies()
    return [
        drafter
        for drafter in known_drafters()
        if drafter.strategy in served and name in map(_plain, drafter.targets)
    ]


def _plain(name: str) -> str:
    """A model's name without owner, maker and quantisation, in lower case."""
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    return QUANTISED.sub("", last)
