"""The draft model of a call and, if they differ, the tokenizers of target and draft model.

They are passed to `generate()` as `tokenizer=` and `assistant_tokenizer=`, as in transformers. If
the assistant is a folder or Hub id, both are loaded by the names of the models.
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
from hf_spec.methods.draft_model.other_tokenizer.drafter import make_cross_tokenizer_drafter
from hf_spec.methods.draft_model.other_tokenizer.text_tokens import TextTokens
from hf_spec.methods.draft_model.other_tokenizer.token_map import TokenizerPair


@dataclass(frozen=True)
class AssistantWithTokenizers:
    """An assistant that was passed with both tokenizers."""

    assistant: Any
    tokenizer: Any
    assistant_tokenizer: Any


class LoadedDraft(NamedTuple):
    """A draft model, and both tokenizers if they differ."""

    model: PreTrainedModel
    pair: TokenizerPair | None = None

    def drafter(
        self, config: DraftModelConfig, policy: LengthPolicy, target: PreTrainedModel
    ) -> DraftModelDrafter:
        """Return a drafter that uses the model."""
        if self.pair is None:
            return DraftModelDrafter(config, self.model, policy, num_embeddings(target))
        return make_cross_tokenizer_drafter(config, self.model, policy, self.pair)


def with_tokenizers(
    config: StrategyConfig, assistant: Any, tokenizer: Any, assistant_tokenizer: Any
) -> Any:
    """Return `assistant`, combined with the tokenizers if `assistant_tokenizer` is passed.

    Raises:
        OptionError: if the target's tokenizer is missing.
        AssistantError: if there is not exactly one assistant.
        UnsupportedError: if the strategy has no draft model.
    """
    if assistant_tokenizer is None:
        return assistant
    if not config.takes_tokenizers:
        raise UnsupportedError(
            f"assistant_tokenizer= cannot be combined with spec_strategy={config.strategy!r}, "
            "which drafts the target's own tokens; leave it out, or use 'draft', 'tree', 'gsd', "
            "'disco' or 'auto'"
        )
    if tokenizer is None:
        raise OptionError("assistant_tokenizer= also needs the target's tokenizer; pass tokenizer=")
    if assistant is None or isinstance(assistant, (list, tuple)):
        raise AssistantError(
            "assistant_tokenizer= is for one draft model, but assistant= has "
            f"{'none' if assistant is None else len(assistant)}; pass one, or the folders of "
            "several, from which their tokenizers are loaded"
        )
    return AssistantWithTokenizers(assistant, tokenizer, assistant_tokenizer)


def find_draft(strategy: str, assistant: Any, target: PreTrainedModel) -> LoadedDraft:
    """Return the draft model of a call, and both tokenizers if they differ.

    Raises:
        AssistantError: as `resolve_draft_model`, and if tokenizers are needed but cannot be loaded.
        OptionError: if a tokenizer does not fit its model, or is not a fast one.
    """
    if isinstance(assistant, AssistantWithTokenizers):
        model = read_draft_model(strategy, assistant.assistant, target)
        return _with_pair(model, target, assistant.tokenizer, assistant.assistant_tokenizer)
    if not isinstance(assistant, (str, os.PathLike)):
        return LoadedDraft(resolve_draft_model(strategy, assistant, target))
    model = read_draft_model(strategy, assistant, target)
    if has_targets_size(model, target):
        return LoadedDraft(model)
    names = str(target.config.name_or_path), os.fspath(assistant)
    key = ("tokenizers", *names)
    tokenizers = cached_per_model(target, key, lambda: [_load_tokenizer(name) for name in names])
    return _with_pair(model, target, *tokenizers)


def _with_pair(
    model: PreTrainedModel, target: PreTrainedModel, tokenizer: Any, assistant_tokenizer: Any
) -> LoadedDraft:
    def make() -> TokenizerPair:
        return TokenizerPair(
            TextTokens(tokenizer, num_embeddings(target), "tokenizer"),
            TextTokens(assistant_tokenizer, num_embeddings(model), "assistant_tokenizer"),
        )

    sizes = len(tokenizer), len(assistant_tokenizer), num_embeddings(model)
    pair = cached_per_model(target, ("tokens", tokenizer, assistant_tokenizer, *sizes), make)
    return LoadedDraft(model, None if pair.identical else pair)


def _load_tokenizer(name: str) -> Any:
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
