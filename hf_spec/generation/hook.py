"""The thin wrappers on `GenerationMixin` that understand `spec_strategy` and `assistant`.

A call of `generate` or `generate_batch` without a strategy goes to the original method with its
arguments untouched. With one, the original `generate` still does all preparation; only its decoding
loop is replaced, through the callable `custom_generate` that transformers offers for that. What
that path would drop on the way (the streamer and the tokenizer) is held here. `generate_batch_iter`
is new.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypeAlias

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from hf_spec.decoding.continuous_batching import ContinuousBatch, as_they_finish
from hf_spec.decoding.drafter import Drafter
from hf_spec.drafting.config import StrategyConfig
from hf_spec.errors import AssistantError, OptionError, UnsupportedError
from hf_spec.execution import attention
from hf_spec.execution.model_checks import check_model
from hf_spec.generation import peft_hook
from hf_spec.generation.call_checks import Settings, check_arguments, check_settings, check_streamer
from hf_spec.generation.call_signature import describe
from hf_spec.generation.encoder_inputs import of_decoder, read_input
from hf_spec.generation.generate_batch import (
    GenerateBatchCall,
    make_continuous_batch,
    run_continuous_batch,
)
from hf_spec.generation.one_call import generate_with
from hf_spec.generation.own_prefill import read_prompt
from hf_spec.generation.target_checks import check_batching, check_evaluation
from hf_spec.outputs import SpecBatchOutput, SpecRequestOutput
from hf_spec.strategies.assistants import find_assistant
from hf_spec.strategies.registry import make_drafter, parse_strategy

# Arguments of generate() that choose or feed another decoding method.
REFUSED_ARGUMENTS = {
    "assistant_model": "pass the draft model as assistant=; for transformers' own assisted "
    "decoding set model.generation_config.spec_strategy = None",
    "assistant_tokenizer": "drafts are made of the target's own tokens",
    "custom_generate": "it replaces the decoding loop, and so does spec_strategy",
    "negative_prompt_ids": "classifier-free guidance is not available with spec_strategy",
    "synced_gpus": "FSDP and ZeRO-3 generation is not available with spec_strategy",
    "inputs_embeds": "give the prompt as input_ids",
    "cache_params": "it does not say how many tokens it holds; give the whole text as input_ids",
}

# What to do instead of arguments that only a strategy understands.
WITHOUT_STRATEGY = {
    "assistant": "use assistant_model= for transformers' own assisted decoding",
    "max_batch": "leave it out: transformers' own continuous batching goes by the memory it finds",
}

# A name or a config; a dictionary where it was read from a file.
StoredStrategy: TypeAlias = str | StrategyConfig | dict[str, Any] | None

# Attribute of the wrapper that holds what it wraps.
_WRAPPED = "_hf_spec_wrapped"


class _StoredStrategy:
    """`GenerationConfig.spec_strategy`: kept in the instance, so that it is saved with the rest."""

    def __get__(self, config: GenerationConfig | None, owner: type) -> StoredStrategy:
        return None if config is None else config.__dict__.get("spec_strategy")

    def __set__(self, config: GenerationConfig, value: StoredStrategy) -> None:
        config.__dict__["spec_strategy"] = value
        if value is not None:
            # A file that says it was made from a model config loses every unknown key on loading.
            config._from_model_config = None


def enable() -> None:
    """Wrap the methods of `GenerationMixin`, as importing hf_spec does; twice is harmless."""
    generate = GenerationMixin.generate
    if hasattr(generate, _WRAPPED):
        return
    attention.register()
    peft_hook.enable()
    one_call = functools.partial(_speculate, generate)
    many_prompts = functools.partial(_generate_all, generate)
    ours = ("spec_strategy", "assistant")
    for name, method in (
        ("generate", _wrap(generate, one_call, *ours)),
        ("generate_batch", _wrap(GenerationMixin.generate_batch, many_prompts, *ours, "max_batch")),
        ("generate_batch_iter", _make_generate_batch_iter(generate)),
    ):
        # None stands for a name that is new or inherited, where ours goes in front.
        setattr(method, _WRAPPED, vars(GenerationMixin).get(name))
        setattr(GenerationMixin, name, method)
    GenerationConfig.spec_strategy = _StoredStrategy()  # type: ignore[attr-defined]
    GenerationConfig.__annotations__["spec_strategy"] = StoredStrategy


def disable() -> None:
    """Give `GenerationMixin` back as it was; twice is harmless."""
    if not hasattr(GenerationMixin.generate, _WRAPPED):
        return
    peft_hook.disable()
    attention.unregister()
    for name in ("generate", "generate_batch", "generate_batch_iter"):
        original = getattr(vars(GenerationMixin)[name], _WRAPPED)
        if original is None:
            delattr(GenerationMixin, name)
        else:
            setattr(GenerationMixin, name, original)
    del GenerationConfig.spec_strategy  # type: ignore[attr-defined]
    del GenerationConfig.__annotations__["spec_strategy"]


def _wrap(original: Any, speculate: Any, *names: str) -> Any:
    """A method that understands the additions `names`; with a strategy `speculate` serves it."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        ours = {name: kwargs.pop(name, None) for name in names}
        bound = signature.bind_partial(self, *args, **kwargs).arguments
        strategy = _resolve(self, ours.pop("spec_strategy"), bound.get("generation_config"))
        if strategy is None:
            _refuse_without_strategy(ours)
            return original(self, *args, **kwargs)
        # The free arguments among the others.
        given = {name: value for name, value in bound.items() if name not in {"self", "kwargs"}}
        given.update(bound.get("kwargs", {}))
        return speculate(self, strategy, {**given, **ours})

    describe(wrapper, original, *names)
    return wrapper


def _make_generate_batch_iter(generate: Any) -> Any:
    def generate_batch_iter(
        model: PreTrainedModel,
        inputs: list[list[int]],
        generation_config: GenerationConfig | None = None,
        *,
        spec_strategy: str | StrategyConfig | None = None,
        assistant: Any = None,
        max_batch: int | None = None,
        **kwargs: Any,
    ) -> Iterator[SpecRequestOutput]:
        """Like `generate_batch` with a strategy, but hand out every sequence as soon as it ends.

        While the caller has the turn the model is as it was found, so it may be used, and the
        iterator may be left at any point.

        Args:
            model: the target.
            inputs: prompts without padding, lists of token ids or 1-D tensors.
            generation_config: as in `generate()`.
            spec_strategy: a name or a config; by default the one that is stored.
            assistant: what the strategy drafts with.
            max_batch: most sequences at a time.
            **kwargs: as in `generate()`.

        Returns:
            An iterator over the outputs in the order in which the sequences end.

        Raises:
            OptionError: if no strategy is named, or an argument cannot be used.
            UnsupportedError: if something cannot be served exactly.
        """
        strategy = _resolve(model, spec_strategy, generation_config)
        if strategy is None:
            raise OptionError("generate_batch_iter() needs spec_strategy=; 'none' drafts nothing")
        given = {"inputs": inputs, "generation_config": generation_config, **kwargs}
        given.update(assistant=assistant, max_batch=max_batch)
        batch = _continuous_batch(generate, model, strategy, given)
        return iter(()) if batch is None else as_they_finish(batch)

    return generate_batch_iter


def _refuse_without_strategy(given: dict[str, Any]) -> None:
    for name, value in given.items():
        if value is not None:
            raise OptionError(
                f"{name}= was given without spec_strategy=; name a strategy such as "
                f"spec_strategy='draft', or {WITHOUT_STRATEGY[name]}"
            )


def _resolve(model: PreTrainedModel, argument: Any, config: GenerationConfig | None) -> Any:
    """The strategy from the call, the given generation config or the model's, in that order."""
    if argument is not None:
        return argument
    if getattr(config, "is_assistant", False):
        return None
    sources = (config, getattr(model, "generation_config", None))
    stored = (getattr(source, "spec_strategy", None) for source in sources)
    return next((strategy for strategy in stored if strategy is not None), None)


def _speculate(original: Any, model: PreTrainedModel, strategy: Any, given: dict[str, Any]) -> Any:
    """A call of `generate` with a strategy."""
    assistant = given.pop("assistant")
    config, settings = _settle(model, strategy, given)
    check_batching(model, config.batching)
    check_arguments(of_decoder(model, given))
    streamer = given.get("streamer")
    check_streamer(streamer)
    drafter = _find_drafter(config, model, assistant)
    given = _with_stop_strings(settings["stop_strings"], _with_own_storage(settings, given))

    read = functools.partial(read_prompt, original, given)
    if model.config.is_encoder_decoder:
        read = functools.partial(read_input, given)

    def decode(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Any:
        # The original has put the prompt into the streamer already; it does not pass it on.
        return generate_with(
            drafter,
            model,
            input_ids,
            streamer=streamer,
            batching=config.batching,
            read=read,
            **prepared,
        )

    return original(model, **given, custom_generate=decode)


def _generate_all(
    generate: Any, model: PreTrainedModel, strategy: Any, given: dict[str, Any]
) -> SpecBatchOutput:
    """A call of `generate_batch` with a strategy."""
    progress_bar = bool(given.pop("progress_bar", False))
    batch = _continuous_batch(generate, model, strategy, given)
    return run_continuous_batch(batch, progress_bar)


def _continuous_batch(
    generate: Any, model: PreTrainedModel, strategy: Any, given: dict[str, Any]
) -> ContinuousBatch | None:
    """The prompts of a call, a few at a time; None without prompts."""
    assistant = given.pop("assistant")
    config, settings = _settle(model, strategy, given)
    given = _with_own_storage(settings, given)
    call = GenerateBatchCall.read(model, config.batching, settings, given)
    if not call.requests:
        return None
    drafter = _find_drafter(config, model, assistant)
    arguments = _with_stop_strings(settings["stop_strings"], call.arguments)
    return make_continuous_batch(generate, model, drafter, replace(call, arguments=arguments))


def _settle(
    model: PreTrainedModel, strategy: Any, given: dict[str, Any]
) -> tuple[StrategyConfig, Settings]:
    """The strategy and the settings of a call whose model they can serve."""
    config = parse_strategy(strategy)
    for name, reason in REFUSED_ARGUMENTS.items():
        if given.get(name) is not None and given[name] is not False:
            raise UnsupportedError(f"{name}= cannot be combined with spec_strategy: {reason}")
    check_model(model)
    check_evaluation(model)
    settings = Settings(model, given)
    check_settings(settings)
    return config, settings


def _with_own_storage(settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    """Keep `generate()` from reserving a static cache: the engine's storage is one."""
    static = settings["cache_implementation"] == "static"
    return {**given, "cache_implementation": None} if static else given


def _find_drafter(config: StrategyConfig, model: PreTrainedModel, assistant: Any) -> Drafter:
    assistant = find_assistant(assistant, model, config.adapter_methods)
    if config.needs_assistant and assistant is None:
        raise AssistantError(
            f"spec_strategy={config.strategy!r} needs assistant=<model, folder or Hub id>, for "
            "instance hf_spec.truncated_draft(model, num_layers)"
        )
    return make_drafter(config, model, assistant)


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
