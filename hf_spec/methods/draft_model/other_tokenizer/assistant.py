"""Draft models with a tokenizer of their own: the two tokenizers, and the drafter made with them.

`generate()` is given them as `tokenizer=` and `assistant_tokenizer=`, as in transformers. Where the
assistant is named, a folder or a Hub id, they are loaded by the names of both models.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

from transformers import AutoTokenizer, PreTrainedModel

from hf_spec.adapters.hub import Place
from hf_spec.common.errors import AssistantError, HubError, OptionError, UnsupportedError
from hf_spec.common.hub import load_named
from hf_spec.drafting.config import StrategyConfig
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.engine.forward.model_cache import cached_per_model
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.draft_model.drafter import DraftModelConfig, DraftModelDrafter
from hf_spec.methods.draft_model.loading import (
    has_targets_size,
    read_draft_model,
    resolve_draft_model,
)
from hf_spec.methods.draft_model.other_tokenizer.drafter import make_translated
from hf_spec.methods.draft_model.other_tokenizer.text_tokens import TextTokens
from hf_spec.methods.draft_model.other_tokenizer.token_map import TokenPair


@dataclass(frozen=True)
class Translated:
    """An assistant that came with both tokenizers."""

    assistant: Any
    tokenizer: Any
    assistant_tokenizer: Any


class Draft(NamedTuple):
    """A draft model, with the tokenizers where they differ."""

    model: PreTrainedModel
    pair: TokenPair | None = None

    def drafter(
        self, config: DraftModelConfig, policy: LengthPolicy, target: PreTrainedModel
    ) -> DraftModelDrafter:
        """What drafts with it."""
        if self.pair is None:
            return DraftModelDrafter(config, self.model, policy, num_embeddings(target))
        return make_translated(config, self.model, policy, self.pair)


def with_tokenizers(
    config: StrategyConfig, assistant: Any, tokenizer: Any, assistant_tokenizer: Any
) -> Any:
    """The assistant of a call with the tokenizers that it gives; itself if it gives none for it.

    Raises:
        OptionError: if the target's tokenizer is missing.
        AssistantError: if there is not exactly one assistant that they are for.
        UnsupportedError: if the strategy has no draft model.
    """
    if assistant_tokenizer is None:
        return assistant
    if not config.takes_tokenizers:
        raise UnsupportedError(
            f"assistant_tokenizer= cannot be combined with spec_strategy={config.strategy!r}, "
            "whose drafts are made of the target's own tokens; leave it out, or choose 'draft', "
            "'tree', 'gsd', 'disco' or 'auto'"
        )
    if tokenizer is None:
        raise OptionError(
            "assistant_tokenizer= is given without the target's own; pass that, too: tokenizer="
        )
    if assistant is None or isinstance(assistant, (list, tuple)):
        raise AssistantError(
            "assistant_tokenizer= is for one draft model, and assistant= has "
            f"{'none' if assistant is None else len(assistant)}; give one, or name the folders of "
            "several, where their tokenizers are found"
        )
    return Translated(assistant, tokenizer, assistant_tokenizer)


def find_draft(strategy: str, assistant: Any, target: PreTrainedModel) -> Draft:
    """The draft model of a call, and its tokenizers if they differ.

    Raises:
        AssistantError: as `resolve_draft_model`, and if tokenizers are needed and cannot be loaded.
        OptionError: if a tokenizer is not that of its model, or not a fast one.
    """
    if isinstance(assistant, Translated):
        model = read_draft_model(strategy, assistant.assistant, target)
        return _paired(model, target, assistant.tokenizer, assistant.assistant_tokenizer)
    if not isinstance(assistant, (str, os.PathLike)):
        return Draft(resolve_draft_model(strategy, assistant, target))
    model = read_draft_model(strategy, assistant, target)
    if has_targets_size(model, target):
        return Draft(model)
    names = str(target.config.name_or_path), os.fspath(assistant)
    key = ("tokenizers", *names)
    tokenizers = cached_per_model(target, key, lambda: [_tokenizer(name) for name in names])
    return _paired(model, target, *tokenizers)


def _paired(
    model: PreTrainedModel, target: PreTrainedModel, tokenizer: Any, assistant_tokenizer: Any
) -> Draft:
    def make() -> TokenPair:
        return TokenPair(
            TextTokens(tokenizer, num_embeddings(target), "tokenizer"),
            TextTokens(assistant_tokenizer, num_embeddings(model), "assistant_tokenizer"),
        )

    sizes = len(tokenizer), len(assistant_tokenizer), num_embeddings(model)
    pair = cached_per_model(target, ("tokens", tokenizer, assistant_tokenizer, *sizes), make)
    return Draft(model, None if pair.same else pair)


def _tokenizer(name: str) -> Any:
    place = Place(name) if os.path.isdir(name) else Place.of(name)
    try:
        return load_named(
            AutoTokenizer,
            place.repo_id,
            revision=place.revision or "main",
            trust_remote_code=False,
        )
    except HubError:
        raise
    except Exception as error:
        raise AssistantError(
            f"the assistant has another vocabulary than the target, and the tokenizer of {name!r} "
            f"cannot be loaded ({str(error).splitlines()[0]}); pass both to generate(): "
            "tokenizer=, assistant_tokenizer="
        ) from error
