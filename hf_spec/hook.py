"""The thin wrapper on `GenerationMixin.generate` that understands `spec_strategy` and `assistant`.

A call without a strategy goes to the original method with its arguments untouched. With one, the
original still does all preparation; only its decoding loop is replaced, through the callable
`custom_generate` that transformers offers for that. What that path would drop on the way (the
streamer and the tokenizer) is held here.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from hf_spec.call_checks import Settings, check_arguments, check_settings, check_streamer
from hf_spec.decoding import attention
from hf_spec.decoding.engine import generate_with
from hf_spec.errors import AssistantError, OptionError, UnsupportedError
from hf_spec.model_checks import check_evaluation, check_model
from hf_spec.strategies import StrategyConfig, make_drafter, parse_strategy

# Arguments of generate() that choose or feed another decoding method.
REFUSED_ARGUMENTS = {
    "assistant_model": "pass the draft model as assistant=; for transformers' own assisted "
    "decoding set model.generation_config.spec_strategy = None",
    "assistant_tokenizer": "drafts are made of the target's own tokens",
    "custom_generate": "it replaces the decoding loop, and so does spec_strategy",
    "negative_prompt_ids": "classifier-free guidance is not available with spec_strategy",
    "synced_gpus": "FSDP and ZeRO-3 generation is not available with spec_strategy",
    "inputs_embeds": "give the prompt as input_ids",
}

# Attribute of the wrapper that holds what it wraps.
_WRAPPED = "_hf_spec_wrapped"


class _StoredStrategy:
    """`GenerationConfig.spec_strategy`: kept in the instance, so that it is saved with the rest."""

    def __get__(self, config: GenerationConfig | None, owner: type) -> Any:
        return None if config is None else config.__dict__.get("spec_strategy")

    def __set__(self, config: GenerationConfig, value: Any) -> None:
        config.__dict__["spec_strategy"] = value
        if value is not None:
            # A file that says it was made from a model config loses every unknown key on loading.
            config._from_model_config = None


def enable() -> None:
    """Wrap `GenerationMixin.generate`, as importing hf_spec does; a second call is harmless."""
    original = GenerationMixin.generate
    if hasattr(original, _WRAPPED):
        return
    attention.register()
    wrapper = _wrap(original)
    setattr(wrapper, _WRAPPED, original)
    GenerationMixin.generate = wrapper  # type: ignore[method-assign]
    GenerationConfig.spec_strategy = _StoredStrategy()  # type: ignore[attr-defined]


def disable() -> None:
    """Give `GenerationMixin.generate` back as it was; a second call is harmless."""
    original = getattr(GenerationMixin.generate, _WRAPPED, None)
    if original is None:
        return
    GenerationMixin.generate = original  # type: ignore[method-assign]
    del GenerationConfig.spec_strategy  # type: ignore[attr-defined]


def _wrap(original: Any) -> Any:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def generate(
        self: PreTrainedModel,
        *args: Any,
        spec_strategy: str | StrategyConfig | None = None,
        assistant: Any = None,
        **kwargs: Any,
    ) -> Any:
        given = signature.bind_partial(self, *args, **kwargs).arguments
        strategy = _resolve(self, spec_strategy, given.get("generation_config"))
        if strategy is None:
            if assistant is not None:
                raise OptionError(
                    "assistant= was given without spec_strategy=; name a strategy such as "
                    "spec_strategy='draft', or use assistant_model= for transformers' own"
                )
            return original(self, *args, **kwargs)
        given.pop("self", None)
        given.update(given.pop("kwargs", {}))
        return _speculate(original, self, strategy, assistant, given)

    return generate


def _resolve(model: PreTrainedModel, argument: Any, config: GenerationConfig | None) -> Any:
    """The strategy from the call, the given generation config or the model's, in that order."""
    if argument is not None:
        return argument
    if getattr(config, "is_assistant", False):
        return None
    own = getattr(model, "generation_config", None)
    for source in (config, own):
        stored = getattr(source, "spec_strategy", None)
        if stored is not None:
            return stored
    return None


def _speculate(
    original: Any, model: PreTrainedModel, strategy: Any, assistant: Any, given: dict[str, Any]
) -> Any:
    config = parse_strategy(strategy)
    for name, reason in REFUSED_ARGUMENTS.items():
        if given.get(name) is not None and given[name] is not False:
            raise UnsupportedError(f"{name}= cannot be combined with spec_strategy: {reason}")
    check_model(model)
    check_evaluation(model)
    settings = Settings(model, given)
    check_settings(settings)
    check_arguments(given)
    check_streamer(given.get("streamer"))
    if config.needs_assistant and assistant is None:
        raise AssistantError(
            f"spec_strategy={config.strategy!r} needs assistant=<model, folder or Hub id>, for "
            "instance hf_spec.truncated_draft(model, num_layers)"
        )
    drafter = make_drafter(config, model, assistant)
    streamer = given.get("streamer")
    given = _with_stop_strings(settings["stop_strings"], given)

    def decode(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Any:
        # The original has put the prompt into the streamer already; it does not pass it on.
        return generate_with(drafter, model, input_ids, streamer=streamer, **prepared)

    return original(model, **given, custom_generate=decode)


def _with_stop_strings(strings: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Turn stop strings into a criterion here, because the tokenizer does not get through."""
    given = dict(given)
    tokenizer = given.pop("tokenizer", None)
    if strings is None:
        return given
    if tokenizer is None:
        raise OptionError(
            f"stop_strings={strings!r} need the model's tokenizer: generate(..., "
            "tokenizer=tokenizer)"
        )
    criteria = StoppingCriteriaList(given.get("stopping_criteria") or [])
    # As in plain generate(), a criterion that the caller made goes before the setting.
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
    return {**given, "stopping_criteria": criteria, "stop_strings": None}
