"""Published draft heads and draft models by target model, from `known_drafters.json` or the Hub.

The table contains what papers, READMEs and documentation name. It does not guarantee that a head
loads with the right layout or drafts well; check it with `hf-spec verify` and `hf-spec bench`. A
wrong one costs only time.

On the Hub, drafters name their target as base model, and so do fine-tuned and quantized copies of
it. Only repositories whose name, tags, or class look like a drafter's are read: their config.json,
no weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import base_name
from hf_spec.adapters.hub import HubRepo
from hf_spec.adapters.published import (
    CONFIG,
    MODELS,
    MTP_INSIDE,
    family_record,
    quantization_method,
    recognize,
)
from hf_spec.adapters.reading import PICKLES, read_json, regular_file
from hf_spec.common.errors import AssistantError, HubError, OptionError
from hf_spec.common.hub import reach_hub
from hf_spec.methods.registry import known_strategies

# License of weights that only their model card states.
ITS_CARD = "its card"
# Repositories read from the Hub's list, the most downloaded first.
MOST_LISTED = 1000
# Words in names, tags, and classes of drafters.
WORDS = re.compile(
    r"eagle|medusa|hydra|domino|dflash|dspark|speculat|\bpard|draft|accelerator", re.I
)
# Common names of families.
FAMILIES = {
    "eagle": "EAGLE",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "medusa": "Medusa",
    "mlp_speculator": "MLP speculator",
    "dflash": "DFlash",
    "dflash2": "DFlash 2",
    "dspark": "DSpark",
    "mtp": "MTP",
    "gemma4_assistant": "Gemma 4 assistant",
    "pard": "PARD",
}

# Name suffix of quantized copies.
QUANTIZED_SUFFIX = re.compile(
    r"-(awq|gptq|fp8|nvfp4|int4|int8|4bit|8bit|bnb|gguf|mlx|dynamic|bf16)\b.*$"
)


@dataclass(frozen=True)
class KnownDrafter:
    """Drafter on the Hub.

    Attributes:
        repo: Hub id, for `assistant=`; of an MTP module the id of the model that it is part of.
        family: kind of drafter, by its common name; empty if unknown.
        strategy: value for `spec_strategy=`; empty if no strategy supports it.
        targets: names of supported target models, without owners.
        license: license of the weights; "its card" if only the model card states one.
        pickled: True if it is published as a pickle, which must be converted first.
        problem: reason why it cannot be used; empty for all entries of the table.
    """

    repo: str
    family: str
    strategy: str
    targets: tuple[str, ...]
    license: str
    pickled: bool
    problem: str = ""


@cache
def known_drafters() -> tuple[KnownDrafter, ...]:
    """Return the whole table."""
    text = resources.files(__package__).joinpath("known_drafters.json").read_text(encoding="utf-8")
    return tuple(
        KnownDrafter(**{**entry, "targets": tuple(entry["targets"])}) for entry in json.loads(text)
    )


def heads_for(model: PreTrainedModel | str, online: bool = False) -> list[KnownDrafter]:
    """Return published drafters for a model or Hub id.

    Args:
        model: quantized copies match the name of the original model.
        online: also list the drafters on the Hub whose cards name this Hub id as their base model.
            Those that cannot be used have the reason in `problem`. By default only a built-in table
            is read, without network.

    Raises:
        OptionError: if `model` is something else, or has no Hub id and `online` is True.
        HubError: if `online` is True and the Hub cannot be reached.
    """
    if not isinstance(model, str) and not hasattr(model, "config"):
        raise OptionError(f"model of type {type(model).__name__}: pass a model or its Hub id")
    full_name = model if isinstance(model, str) else base_name(model)
    name = _base_name(full_name)
    strategies = known_strategies()
    found = [
        drafter
        for drafter in known_drafters()
        if drafter.strategy in strategies and name in map(_base_name, drafter.targets)
    ]
    if not online:
        return found
    listed = {drafter.repo for drafter in found}
    return found + [drafter for drafter in _on_hub(full_name) if drafter.repo not in listed]


def _on_hub(name: str) -> list[KnownDrafter]:
    """Return the drafters whose cards name the Hub id `name` as their base model."""
    if Path(name).exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        raise OptionError(
            f"online=True needs the Hub id of a published model, such as 'Qwen/Qwen3-8B', not "
            f"{name!r}; pass the id, or leave out online= for the built-in table"
        )
    reach_hub()
    options: dict[str, Any] = {"full": True, "fetch_config": True, "sort": "downloads"}
    try:
        listed = HfApi().list_models(filter=f"base_model:{name}", limit=MOST_LISTED, **options)
        candidates = [info for info in listed if _looks_like_drafter(info)]
    except (HfHubHTTPError, OSError) as error:
        raise HubError(f"the Hub cannot list the drafters of {name!r}: {error}") from error
    return [_listed_drafter(info, name) for info in candidates]


def _looks_like_drafter(info: Any) -> bool:
    """Return True for listed repositories with one of `WORDS`, or a drafter's class."""
    config = info.config or {}
    # Tags with the base model contain its name.
    tags = [tag for tag in info.tags or () if not tag.startswith("base_model:")]
    texts = (info.id.rpartition("/")[2], *tags, *(config.get("architectures") or ()))
    return any(map(WORDS.search, texts)) or recognize(config) not in (None, MTP_INSIDE)


def _listed_drafter(info: Any, target: str) -> KnownDrafter:
    files = {sibling.rfilename for sibling in info.siblings or ()}
    licenses = [tag.partition(":")[2] for tag in info.tags or () if tag.startswith("license:")]
    family, strategy, problem = _classify(info, files)
    has_safetensors = any(file.endswith(".safetensors") for file in files)
    pickled = not has_safetensors and any(file.endswith(tuple(PICKLES)) for file in files)
    if not (problem or has_safetensors or pickled):
        problem = "it has no weights as safetensors"
    return KnownDrafter(
        repo=info.id,
        family=FAMILIES.get(family, family),
        strategy=strategy,
        targets=(target.rpartition("/")[2],),
        license=licenses[0] if licenses else ITS_CARD,
        pickled=pickled,
        problem=problem,
    )


def _classify(info: Any, files: Collection[str]) -> tuple[str, str, str]:
    """Return family, strategy, and problem of a listed repository, as far as it has them."""
    if CONFIG not in files:
        return "", "", f"it has no {CONFIG}"
    family = ""
    try:
        config = read_json(regular_file(HubRepo(info.id).fetch((CONFIG,)), CONFIG))
        family = recognize(config) or ""
        if family in ("", MTP_INSIDE):
            return "", "", "its config is not that of a drafter"
        strategy = family_record(family, info.id).strategy
    except AssistantError as error:
        if info.gated and not family:
            return "", "", "it is gated; request access on the Hub"
        return family, "", str(error).partition("\n")[0]
    # Drafters that are ordinary models may be quantized.
    method = None if family in MODELS else quantization_method(config)
    return family, strategy, f"it is stored quantized ({method})" if method else ""


def _base_name(name: str) -> str:
    """Return a model name in lower case, without owner, "meta-" and quantization suffix."""
    last = name.rstrip("/").rpartition("/")[2].lower().removeprefix("meta-")
    return QUANTIZED_SUFFIX.sub("", last)
