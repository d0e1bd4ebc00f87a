"""What can be measured: plain generate, what others offer, and our strategies."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import CompileConfig

from hf_spec.common.errors import UnsupportedError
from hf_spec.common.outputs import SpecStats
from hf_spec.drafting.config import StrategyConfig

# Arguments of generate() besides the prompt.
Settings = Mapping[str, Any]
GREEDY: Settings = MappingProxyType({"do_sample": False})


@dataclass(frozen=True)
class Run:
    """Outcome of one generation: (B, L) int64, prompts included, and what could be counted."""

    sequences: Tensor
    target_forwards: int | None = None
    stats: SpecStats | None = None

    @property
    def sequence(self) -> Tensor:
        """(L,) int64, the first row."""
        return self.sequences[0]


class Generate(Protocol):
    """Generates from (B, L) ids, padded on the left where the (B, L) mask is 0."""

    def __call__(self, ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run: ...  # noqa: D102


@dataclass(frozen=True)
class Contender:
    """A named way to generate.

    Attributes:
        run: generates at most so many new tokens.
        prepare: called with the same, untimed, before the first run; the target forwards, if
            counting them needs a call of its own.
        batches: whether it takes more than one row.
        compiles: whether new shapes take minutes, so that it is warmed up at full length.
        ours: whether it runs in our engine, whose parts can be timed.
    """

    name: str
    run: Generate
    prepare: Callable[[Tensor, int, Tensor | None], int | None] | None = None
    batches: bool = True
    compiles: bool = False
    ours: bool = False


def plain(model: PreTrainedModel, settings: Settings = GREEDY) -> Contender:
    """`generate()` itself."""
    return transformers("plain", model, settings)


def compiled(model: PreTrainedModel, settings: Settings = GREEDY) -> Contender:
    """`generate()` with a static cache and a compiled forward pass, which is transformers' own.

    Raises:
        UnsupportedError: if it does not work for this model here.
    """
    config = CompileConfig()
    # transformers compiles on a GPU by itself; on a CPU this is the switch.
    config._compile_all_devices = True  # type: ignore[assignment]
    if model.device.type == "cpu":
        config.mode = "default"
    given = {**settings, "cache_implementation": "static", "compile_config": config}

    def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        # Counting forwards by a hook would compile the model again.
        sequences = _generate(model, ids, new_tokens, mask, **given)
        return Run(sequences, sequences.shape[1] - ids.shape[1])

    try:
        run(torch.zeros(1, 2, dtype=torch.long), 3, torch.ones(1, 2, dtype=torch.long))
    except Exception as error:
        raise UnsupportedError(
            f"--compiled: {type(model).__name__} cannot be compiled here; leave --compiled out "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0]:.200})"
        ) from error
    if not hasattr(model, "_compiled_call"):
        raise UnsupportedError(
            f"--compiled: transformers does not compile {type(model).__name__} on "
            f"{model.device.type}; leave --compiled out"
        )
    return Contender("plain, static cache, compiled", run, compiles=True)


def economize_lookup(
    model: PreTrainedModel, match_length: int, copy_length: int
) -> Contender | None:
    """The lookup of the package `economize`, greedy; None if it is not installed."""
    if importlib.util.find_spec("economize") is None:
        return None
    import economize
    from economize.techniques.lookup import LookupConfig

    wrapped = economize.apply(
        model,
        LookupConfig(max_ngram=match_length),
        decoding=economize.DecodeConfig(cycle_length=copy_length + 1),
    )

    def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        ids = ids.to(model.device)
        return Run(wrapped.generate(ids, max_new_tokens=new_tokens, do_sample=False))

    def count(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> int:
        # Decoding that counts its calls does not stop where the sequence ends.
        length = run(ids, new_tokens).sequences.shape[1] - ids.shape[1]
        result = wrapped.decode(ids[0].to(model.device), length)
        return int(result.cost_summary()["exact_calls"])

    return Contender("economize lookup", run, count, batches=False)


def strategy(
    model: Any,
    config: StrategyConfig,
    assistant: Any = None,
    name: str | None = None,
    settings: Settings = GREEDY,
) -> Contender:
    """One of our strategies."""

    def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        method = {"spec_strategy": config, "assistant": assistant}
        return speculative(model, ids, new_tokens, mask, settings, **method)

    return Contender(name or config.strategy, run, ours=True)


def speculative(
    model: Any,
    ids: Tensor,
    new_tokens: int,
    mask: Tensor | None = None,
    settings: Settings = GREEDY,
    **method: Any,
) -> Run:
    """One generation by our engine, which `method` makes `generate()` use; else as `Generate`."""
    given = {**settings, **method, "return_dict_in_generate": True}
    output = _generate(model, ids, new_tokens, mask, **given)
    return Run(output.sequences, output.spec_stats.target_forwards, output.spec_stats)


def transformers(name: str, model: Any, settings: Settings, batches: bool = True) -> Contender:
    """A way of transformers' own, whose forwards a hook counts."""

    def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        forwards = 0

        def count(*_: Any) -> None:
            nonlocal forwards
            forwards += 1

        handle = model.register_forward_pre_hook(count)
        try:
            sequences = _generate(model, ids, new_tokens, mask, **settings)
        finally:
            handle.remove()
        return Run(sequences, forwards)

    return Contender(name, run, batches=batches)


def _generate(model: Any, ids: Tensor, new_tokens: int, mask: Tensor | None, **given: Any) -> Any:
    if mask is not None:
        given["attention_mask"] = mask.to(model.device)
    return model.generate(ids.to(model.device), max_new_tokens=new_tokens, **given)
