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
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hf_spec.common.errors import OptionError
from hf_spec.common.outputs import SpecBatchOutput, SpecRequestOutput
from hf_spec.drafting.config import StrategyConfig
from hf_spec.engine.decode.continuous_batching import ContinuousBatch, as_they_finish
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.forward import tree_attention as attention
from hf_spec.generation import peft_hook
from hf_spec.generation.call_checks import check_arguments, check_streamer
from hf_spec.generation.call_signature import describe
from hf_spec.generation.encoder_inputs import decoder_kwargs, read_input
from hf_spec.generation.generate_batch import (
    make_continuous_batch,
    run_continuous_batch,
    settle_batch,
)
from hf_spec.generation.one_call import generate_with
from hf_spec.generation.own_prefill import read_prompt
from hf_spec.generation.settling import (
    build_drafter,
    settle,
    stop_strings_to_criteria,
    with_own_storage,
)
from hf_spec.generation.target_checks import check_batching

# What to do instead of arguments that only a strategy understands.
WITHOUT_STRATEGY = {
    "assistant": "use assistant_model= for transformers' own assisted decoding",
    "max_batch": "leave it out: transformers' own continuous batching goes by the memory it finds",
}

# A name or a config; a dictionary where it was read from a file.
StoredStrategy: TypeAlias = str | StrategyConfig | dict[str, Any] | None
# Folders and Hub ids of what it drafts with.
StoredAssistant: TypeAlias = str | list[str] | None

# Attribute of the wrapper that holds what it wraps.
_WRAPPED = "_hf_spec_wrapped"


class _Stored:
    """A field of `GenerationConfig`, kept in the instance, so that it is saved with the rest."""

    def __init__(self, name: str):
        self._name = name

    def __get__(self, config: GenerationConfig | None, owner: type) -> Any:
        return None if config is None else config.__dict__.get(self._name)

    def __set__(self, config: GenerationConfig, value: Any) -> None:
        config.__dict__[self._name] = value
        if value is not None:
            # A file that says it was made from a model config loses every unknown key on loading.
            config._from_model_config = None


class _StoredNames(_Stored):
    """A field that is there only while it holds something.

    Some models' own `generate()` moves each argument that a generation config has, into a copy of
    it, before it calls this one; what a config cannot hold is to come as an argument.
    """

    def __get__(self, config: GenerationConfig | None, owner: type) -> Any:
        if config is not None and self._name not in config.__dict__:
            raise AttributeError(f"no {self._name} is stored")
        return super().__get__(config, owner)

    def __set__(self, config: GenerationConfig, value: Any) -> None:
        names = _names(value)
        super().__set__(config, names)
        if names is None:
            del config.__dict__[self._name]


def _names(assistant: Any) -> StoredAssistant:
    """Assistants as a generation config can hold them, which every call copies."""
    if assistant is None:
        return None
    if isinstance(assistant, (list, tuple)):
        return [str(_names(one)) for one in assistant]
    if not isinstance(assistant, (str, os.PathLike)):
        raise OptionError(
            f"generation_config.assistant of type {type(assistant).__name__}: a generation config "
            "holds folders and Hub ids; pass anything else as generate(..., assistant=), and to a "
            "model with a generate() of its own, such as Whisper, only while none is stored"
        )
    return os.fspath(assistant)


STORED = {
    "spec_strategy": (_Stored("spec_strategy"), StoredStrategy),
    "assistant": (_StoredNames("assistant"), StoredAssistant),
}


def enable() -> None:
    """Wrap the methods of `GenerationMixin`, as importing hf_spec does; twice is harmless."""
    generate = GenerationMixin.generate
    if hasattr(generate, _WRAPPED):
        return
    attention.register()
    peft_hook.enable()
    one_call = functools.partial(speculate, generate)
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
    for name, (field, kind) in STORED.items():
        setattr(GenerationConfig, name, field)
        GenerationConfig.__annotations__[name] = kind


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
    for name in STORED:
        delattr(GenerationConfig, name)
        del GenerationConfig.__annotations__[name]


def original_generate() -> Any:
    """`GenerationMixin.generate` as transformers has it, whether or not it is wrapped."""
    return getattr(GenerationMixin.generate, _WRAPPED, GenerationMixin.generate)


def _wrap(original: Any, speculate: Any, *names: str) -> Any:
    """A method that understands the additions `names`; with a strategy `speculate` serves it."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        ours = {name: kwargs.pop(name, None) for name in names}
        bound = signature.bind_partial(self, *args, **kwargs).arguments
        strategy, ours = _resolve(self, ours, bound.get("generation_config"))
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
        ours = {"spec_strategy": spec_strategy, "assistant": assistant, "max_batch": max_batch}
        strategy, ours = _resolve(model, ours, generation_config)
        if strategy is None:
            raise OptionError("generate_batch_iter() needs spec_strategy=; 'none' drafts nothing")
        given = {"inputs": inputs, "generation_config": generation_config, **kwargs, **ours}
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


def _resolve(
    model: PreTrainedModel, ours: dict[str, Any], config: GenerationConfig | None
) -> tuple[Any, dict[str, Any]]:
    """The strategy from the call, the given generation config or the model's, in that order.

    Returns:
        It, and the call's other additions; a stored strategy brings the assistant stored with it.
    """
    strategy, others = ours["spec_strategy"], {k: v for k, v in ours.items() if k not in STORED}
    assistant = ours["assistant"]
    if strategy is None and not getattr(config, "is_assistant", False):
        for source in (config, getattr(model, "generation_config", None)):
            strategy = getattr(source, "spec_strategy", None)
            if strategy is not None:
                assistant = getattr(source, "assistant", None) if assistant is None else assistant
                break
    return strategy, {**others, "assistant": assistant}


def speculate(
    original: Any,
    model: PreTrainedModel,
    strategy: Any,
    given: dict[str, Any],
    watch: Callable[[Drafter], object] = lambda drafter: None,
) -> Any:
    """A call of `generate` with a strategy.

    Args:
        original: transformers' own `generate`.
        model: the target.
        strategy: a name or a config.
        given: the arguments by name, `assistant` among them.
        watch: called with the drafter before it drafts.
    """
    assistant = given.pop("assistant")
    config, settings = settle(model, strategy, given)
    check_batching(model, config.batching)
    check_arguments(decoder_kwargs(model, given))
    streamer = given.get("streamer")
    check_streamer(streamer)
    drafter = build_drafter(config, model, assistant, given)
    watch(drafter)
    given = stop_strings_to_criteria(settings["stop_strings"], with_own_storage(settings, given))

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
    config, call = settle_batch(model, strategy, given)
    if not call.requests:
        return None
    drafter = build_drafter(config, model, assistant, given)
    return make_continuous_batch(generate, model, drafter, call)
