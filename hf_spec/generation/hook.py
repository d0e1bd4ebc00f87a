"""Wrappers of `GenerationMixin` methods that take `spec_strategy` and `assistant`.

A call without a strategy goes to the original method unchanged. With one, the original `generate`
still prepares everything; only its decoding loop is replaced, through transformers' argument
`custom_generate`. `generate_batch_iter` is new.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hf_spec.backend.device.placement import host_default
from hf_spec.common.errors import OptionError
from hf_spec.common.outputs import SpecBatchOutput, SpecRequestOutput
from hf_spec.drafting.config import StrategyConfig
from hf_spec.engine.decode.continuous_batching import ContinuousBatch, iterate_finished
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.forward import tree_attention as attention
from hf_spec.generation import peft_hook
from hf_spec.generation.call_checks import check_arguments, check_streamer, num_sequences
from hf_spec.generation.call_setup import (
    build_drafter,
    resolve_call,
    stop_strings_to_criteria,
    without_static_cache,
)
from hf_spec.generation.call_signature import describe
from hf_spec.generation.encoder_input import decoder_kwargs, read_input
from hf_spec.generation.generate_batch import (
    prepare_request,
    resolve_batch_call,
    run_continuous_batch,
)
from hf_spec.generation.one_call import generate_with
from hf_spec.generation.own_prefill import read_prompt
from hf_spec.generation.peft_hook import WRAPPED
from hf_spec.generation.target_checks import check_batching

# Alternatives to arguments that need a strategy.
WITHOUT_STRATEGY = {
    "assistant": "use assistant_model= for transformers' own assisted decoding",
    "max_batch": "leave it out: transformers' own continuous batching uses the available memory",
}

# A name or a config; a dictionary if it was read from a file.
StoredStrategy: TypeAlias = str | StrategyConfig | dict[str, Any] | None
# Folders and Hub ids of assistants.
StoredAssistant: TypeAlias = str | list[str] | None


class _StoredField:
    """Field of `GenerationConfig`, stored in the instance so that it is saved with the rest."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, config: GenerationConfig | None, owner: type) -> Any:
        return None if config is None else config.__dict__.get(self._name)

    def __set__(self, config: GenerationConfig, value: Any) -> None:
        config.__dict__[self._name] = value
        if value is not None:
            # With this flag, a saved file loses every unknown key on loading.
            config._from_model_config = None


class _AssistantField(_StoredField):
    """Field that exists only while it has a value.

    Some models' own `generate()` moves every argument that is a field of the generation config into
    a copy of it before calling this one. An assistant that a config cannot store must stay an
    argument.
    """

    def __get__(self, config: GenerationConfig | None, owner: type) -> Any:
        if config is not None and self._name not in config.__dict__:
            raise AttributeError(f"no {self._name} is stored")
        return super().__get__(config, owner)

    def __set__(self, config: GenerationConfig, value: Any) -> None:
        names = _assistant_names(value)
        super().__set__(config, names)
        if names is None:
            del config.__dict__[self._name]


def _assistant_names(assistant: Any) -> StoredAssistant:
    """Return assistants as a generation config can store them: every call copies the config."""
    if assistant is None:
        return None
    if isinstance(assistant, (list, tuple)):
        return [str(_assistant_names(entry)) for entry in assistant]
    if not isinstance(assistant, (str, os.PathLike)):
        raise OptionError(
            f"generation_config.assistant of type {type(assistant).__name__}: a generation config "
            "stores folders and Hub ids; pass anything else as generate(..., assistant=), and to a "
            "model with a generate() of its own, such as Whisper, only while none is stored"
        )
    return os.fspath(assistant)


STORED = {
    "spec_strategy": (_StoredField("spec_strategy"), StoredStrategy),
    "assistant": (_AssistantField("assistant"), StoredAssistant),
}


def enable() -> None:
    """Wrap the methods of `GenerationMixin`; importing hf_spec does so. May be called twice."""
    generate = GenerationMixin.generate
    if hasattr(generate, WRAPPED):
        return
    attention.register()
    peft_hook.enable()
    one_call = functools.partial(speculate, generate)
    many_prompts = functools.partial(_generate_all, generate)
    names = ("spec_strategy", "assistant")
    for name, method in (
        ("generate", _wrap(generate, one_call, *names)),
        (
            "generate_batch",
            _wrap(GenerationMixin.generate_batch, many_prompts, *names, "max_batch"),
        ),
        ("generate_batch_iter", _make_generate_batch_iter(generate)),
    ):
        # None if the class does not define the name itself.
        setattr(method, WRAPPED, vars(GenerationMixin).get(name))
        setattr(GenerationMixin, name, method)
    for name, (field, kind) in STORED.items():
        setattr(GenerationConfig, name, field)
        GenerationConfig.__annotations__[name] = kind


def disable() -> None:
    """Restore the methods of `GenerationMixin`. May be called twice."""
    if not hasattr(GenerationMixin.generate, WRAPPED):
        return
    peft_hook.disable()
    attention.unregister()
    for name in ("generate", "generate_batch", "generate_batch_iter"):
        original = getattr(vars(GenerationMixin)[name], WRAPPED)
        if original is None:
            delattr(GenerationMixin, name)
        else:
            setattr(GenerationMixin, name, original)
    for name in STORED:
        delattr(GenerationConfig, name)
        del GenerationConfig.__annotations__[name]


def original_generate() -> Any:
    """Return `GenerationMixin.generate` of transformers, whether or not it is wrapped."""
    return getattr(GenerationMixin.generate, WRAPPED, GenerationMixin.generate)


def _wrap(original: Any, speculate: Any, *names: str) -> Any:
    """Return a method that also takes `names` and calls `speculate` if there is a strategy."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        additions = {name: kwargs.pop(name, None) for name in names}
        bound = signature.bind_partial(self, *args, **kwargs).arguments
        strategy, additions = _resolve_stored(self, additions, bound.get("generation_config"))
        if strategy is None:
            _check_without_strategy(additions)
            return original(self, *args, **kwargs)
        arguments = {name: value for name, value in bound.items() if name not in {"self", "kwargs"}}
        arguments.update(bound.get("kwargs", {}))
        return speculate(self, strategy, {**arguments, **additions})

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
        """Like `generate_batch` with a strategy, but yield every sequence as soon as it ends.

        Between two sequences the model is restored, so the caller may use it and may stop iterating
        at any point.

        Args:
            model: the target.
            inputs: prompts without padding, lists of token ids or 1-D tensors.
            generation_config: as in `generate()`.
            spec_strategy: a name or a config. Default: the stored one.
            assistant: what the strategy drafts with.
            max_batch: maximum number of sequences at a time.
            **kwargs: as in `generate()`.
        """
        additions = {"spec_strategy": spec_strategy, "assistant": assistant, "max_batch": max_batch}
        strategy, additions = _resolve_stored(model, additions, generation_config)
        if strategy is None:
            raise OptionError("generate_batch_iter() needs spec_strategy=; 'none' drafts nothing")
        arguments = {"inputs": inputs, "generation_config": generation_config}
        arguments |= {**kwargs, **additions}
        batch = _continuous_batch(generate, model, strategy, arguments)
        return iter(()) if batch is None else iterate_finished(batch)

    return generate_batch_iter


def _check_without_strategy(additions: dict[str, Any]) -> None:
    for name, value in additions.items():
        if value is not None:
            raise OptionError(
                f"{name}= was given without spec_strategy=; name a strategy such as "
                f"spec_strategy='draft', or {WITHOUT_STRATEGY[name]}"
            )


def _resolve_stored(
    model: PreTrainedModel, additions: dict[str, Any], config: GenerationConfig | None
) -> tuple[Any, dict[str, Any]]:
    """Return the strategy and the other additions of a call.

    The strategy is that of the call, of the call's generation config or of the model's, in this
    order. A stored strategy uses the assistant that is stored with it, unless the call has one.
    """
    strategy, assistant = additions["spec_strategy"], additions["assistant"]
    others = {name: value for name, value in additions.items() if name not in STORED}
    if strategy is None and not getattr(config, "is_assistant", False):
        for source in (config, getattr(model, "generation_config", None)):
            strategy = getattr(source, "spec_strategy", None)
            if strategy is not None:
                assistant = getattr(source, "assistant", None) if assistant is None else assistant
                break
    return strategy, {**others, "assistant": assistant}


@host_default()
def speculate(
    original: Any,
    model: PreTrainedModel,
    strategy: Any,
    arguments: dict[str, Any],
    watch: Callable[[Drafter], object] = lambda drafter: None,
) -> Any:
    """Run a call of `generate` with a strategy; `watch` gets the drafter before it drafts."""
    assistant = arguments.pop("assistant")
    config, settings = resolve_call(model, strategy, arguments)
    check_batching(model, config.batching)
    check_arguments(decoder_kwargs(model, arguments))
    streamer = arguments.get("streamer")
    # Before generate() passes the prompts to the streamer.
    check_streamer(streamer, num_sequences(arguments, settings))
    drafter = build_drafter(config, model, assistant, arguments)
    watch(drafter)
    arguments = stop_strings_to_criteria(
        settings["stop_strings"], without_static_cache(settings, arguments)
    )
    read = functools.partial(read_prompt, original, arguments)
    if model.config.is_encoder_decoder:
        read = functools.partial(read_input, arguments)

    def decode(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Any:
        # The original has streamed the prompt, but does not pass the streamer on.
        return generate_with(
            drafter,
            model,
            input_ids,
            streamer=streamer,
            batching=config.batching,
            read=read,
            **prepared,
        )

    return original(model, **arguments, custom_generate=decode)


def _generate_all(
    generate: Any, model: PreTrainedModel, strategy: Any, arguments: dict[str, Any]
) -> SpecBatchOutput:
    progress_bar = bool(arguments.pop("progress_bar", False))
    return run_continuous_batch(
        _continuous_batch(generate, model, strategy, arguments), progress_bar
    )


@host_default()
def _continuous_batch(
    generate: Any, model: PreTrainedModel, strategy: Any, arguments: dict[str, Any]
) -> ContinuousBatch | None:
    """Return the batch of a call; None without prompts."""
    assistant = arguments.pop("assistant")
    call = resolve_batch_call(model, strategy, arguments)
    if not call.requests:
        return None
    drafter = build_drafter(call.config, model, assistant, arguments)
    prepare = functools.partial(prepare_request, generate, model, call)
    return ContinuousBatch(
        model, drafter, call.requests, prepare, call.max_batch, call.streamer, call.config.batching
    )
