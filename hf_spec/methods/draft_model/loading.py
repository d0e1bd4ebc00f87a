"""The drafters of `draft` and `tree`, with their draft model and, if they differ, tokenizers.

A draft model is passed as an object, a folder, a Hub id or an adapter of `hf-spec train draft`. The
tokenizers are passed to `generate()` as `tokenizer=` and `assistant_tokenizer=`, as in
transformers. If the assistant is a folder or Hub id, both are loaded by the names of the models.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_spec.adapters.folder import SpecAdapter, is_adapter, load_adapter
from hf_spec.adapters.hub import HubRepo
from hf_spec.common.errors import (
    AssistantError,
    HubError,
    OptionError,
    SpecError,
    UnsupportedError,
)
from hf_spec.common.hub import load_named
from hf_spec.drafting.config import AssistantConfig, StrategyConfig, shared_options
from hf_spec.drafting.cost_model.adaptive_length_drafter import with_policy
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.forward.model_cache import cached_per_model
from hf_spec.engine.forward.vocabulary import PADDED_ROWS, num_embeddings
from hf_spec.engine.models.cross_attention import attends_to_encoder, is_lone_decoder
from hf_spec.engine.models.support_checks import check_model
from hf_spec.methods.draft_model.drafter import DraftConfig, DraftModelDrafter, TreeConfig
from hf_spec.methods.draft_model.other_tokenizer.drafter import make_cross_tokenizer_drafter
from hf_spec.methods.draft_model.other_tokenizer.tokenizers import TextTokens, TokenizerPair
from hf_spec.methods.draft_model.smaller import smaller_model
from hf_spec.methods.draft_model.trained import METHOD
from hf_spec.methods.loading import adapter_module, build_adapter, read_once, reject_published
from hf_spec.methods.registry import register


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
        self, config: DraftConfig, policy: LengthPolicy, target: PreTrainedModel
    ) -> DraftModelDrafter:
        """Return a drafter that uses the model, or a faster copy if the config requests one."""
        model = smaller_model(self.model, config.assistant_bits, config.draft_vocab_size)
        if self.pair is None:
            return DraftModelDrafter(config, model, policy, num_embeddings(target))
        return make_cross_tokenizer_drafter(config, model, policy, self.pair)


def with_tokenizers(
    config: StrategyConfig, assistant: Any, tokenizer: Any, assistant_tokenizer: Any
) -> Any:
    """Return `assistant`, combined with the tokenizers if `assistant_tokenizer` is passed."""
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


def make_drafter(config: DraftConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    """Return the drafter of a config, with its draft model loaded and checked."""
    draft = find_draft(config.strategy, assistant, target)
    make = partial(draft.drafter, target=target)
    return with_policy(config, target, make, config.shape.children)


def tree_for_auto(config: AssistantConfig) -> TreeConfig:
    """Return the tree that a draft model grows for `auto`."""
    return TreeConfig(**shared_options(config))


def _make_for_auto(target: PreTrainedModel, assistant: object, auto: AssistantConfig) -> Drafter:
    return make_drafter(tree_for_auto(auto), target, assistant)


register("draft", make_drafter)(DraftConfig)
register("tree", make_drafter, _make_for_auto)(TreeConfig)


def find_draft(strategy: str, assistant: Any, target: PreTrainedModel) -> LoadedDraft:
    """Return the draft model of a call, and both tokenizers if they differ."""
    if isinstance(assistant, AssistantWithTokenizers):
        model = read_draft_model(strategy, assistant.assistant, target)
        return _with_pair(model, target, assistant.tokenizer, assistant.assistant_tokenizer)
    if not isinstance(assistant, (str, os.PathLike)):
        return LoadedDraft(resolve_draft_model(strategy, assistant, target))
    model = read_draft_model(strategy, assistant, target)
    if _has_targets_size(model, target):
        return LoadedDraft(model)
    names = str(target.config.name_or_path), os.fspath(assistant)
    key = ("tokenizers", *names)
    tokenizers = cached_per_model(target, key, lambda: [_load_tokenizer(name) for name in names])
    return _with_pair(model, target, *tokenizers)


def resolve_draft_model(
    strategy: str, assistant: object, target: PreTrainedModel
) -> PreTrainedModel:
    """Return the draft model for `assistant`, checked against the target.

    It is a model, a PEFT model, a `SpecAdapter`, or a folder or Hub id of a model or draft adapter;
    `strategy` is for messages. A missing or unfit one raises `AssistantError`.
    """
    model = read_draft_model(strategy, assistant, target)
    if not _has_targets_size(model, target):
        raise AssistantError(
            f"the assistant's vocabulary has {num_embeddings(model)} tokens, the target's "
            f"{num_embeddings(target)}, more than padding explains; choose a model of the same "
            "family, or give generate() both tokenizers: tokenizer=, assistant_tokenizer="
        )
    return model


def read_draft_model(strategy: str, assistant: object, target: PreTrainedModel) -> PreTrainedModel:
    """Return the same as `resolve_draft_model` without the check of the vocabulary."""
    if assistant is None:
        raise AssistantError(
            f"spec_strategy={strategy!r} needs a draft model: pass assistant=<model, folder or Hub "
            "id>, for instance hf_spec.truncated_draft(model, num_layers)"
        )
    if isinstance(assistant, (str, os.PathLike)):
        name = os.fspath(assistant)
        assistant = read_once(target, METHOD, name, lambda: _load_model(name, target))
    elif isinstance(assistant, SpecAdapter):
        assistant = adapter_module(assistant, METHOD, target)
    unwrap = getattr(assistant, "get_base_model", None)
    model = unwrap() if callable(unwrap) else assistant
    if not isinstance(model, PreTrainedModel):
        raise AssistantError(
            f"assistant of type {type(assistant).__name__} is not a draft model; pass a "
            "PreTrainedModel, a PeftModel, a folder or a Hub id"
        )
    try:
        check_model(model)
        _check_encoder(model, target)
    except SpecError as error:
        raise AssistantError(f"the assistant cannot draft: {error}") from error
    return model


def _has_targets_size(model: PreTrainedModel, target: PreTrainedModel) -> bool:
    return abs(num_embeddings(model) - num_embeddings(target)) <= PADDED_ROWS


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


def _check_encoder(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Reject a draft model that attends to an encoder output which the target cannot provide."""
    if not attends_to_encoder(draft):
        return
    draft_name, target_name = type(draft).__name__, type(target).__name__
    if not target.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{draft_name} needs the output of an encoder; {target_name} has none"
        )
    # A decoder alone reads the target's encoder output; a whole model encodes the same input.
    size = "d_model" if is_lone_decoder(draft) else "num_mel_bins"
    draft_size, target_size = (getattr(model.config, size) for model in (draft, target))
    if draft_size != target_size:
        raise UnsupportedError(
            f"{draft_name} has {size} {draft_size}, and {target_name} has {target_size}, so it "
            "cannot read the same sound"
        )


def _load_model(name: str, target: PreTrainedModel) -> PreTrainedModel:
    if is_adapter(name):
        draft: PreTrainedModel = build_adapter(load_adapter(name, METHOD), target)
        return draft
    reject_published(name, "not a draft model")
    model: PreTrainedModel = _load(
        AutoModelForCausalLM,
        name,
        lambda error: f"assistant={name!r} cannot be loaded: {error}",
        dtype=target.dtype,
        use_safetensors=True,
        device_map={"": target.device},
    )
    return model.eval()


def _load_tokenizer(name: str) -> Any:
    return _load(
        AutoTokenizer,
        name,
        lambda error: (
            f"the assistant has another vocabulary than the target, and the tokenizer of {name!r} "
            f"cannot be loaded ({str(error).splitlines()[0]}); pass both to generate(): "
            "tokenizer=, assistant_tokenizer="
        ),
    )


def _load(kind: Any, name: str, failure: Callable[[Exception], str], **options: Any) -> Any:
    repo = HubRepo(name) if Path(name).exists() else HubRepo.of(name)
    try:
        return load_named(kind, repo.repo_id, revision=repo.revision or "main", **options)
    except HubError:
        raise
    except Exception as error:
        raise AssistantError(failure(error)) from error
