"""Contenders of a benchmark: plain `generate()`, other implementations, and our strategies.

Oracle and synthetic contenders draft from the target's recorded output; no config selects them.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import CompileConfig

from hf_spec.common.errors import UnsupportedError
from hf_spec.common.outputs import SpecStats
from hf_spec.drafting.config import StrategyConfig
from hf_spec.drafting.length_policy import DraftedToken, LengthPolicy
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.generation.one_call import generate_with
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.methods.draft_model.loading import DraftConfig

# Arguments of generate() besides the prompt.
Settings = Mapping[str, Any]
GREEDY: Settings = MappingProxyType({"do_sample": False})
# Per row the generated token ids, without the prompt.
Outputs = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Run:
    """Result of one generation: (B, L) int64 ids including the prompts, and the counters."""

    sequences: Tensor
    target_forwards: int | None = None
    stats: SpecStats | None = None

    @property
    def sequence(self) -> Tensor:
        """(L,) int64, the first row."""
        return self.sequences[0]


# (ids, new_tokens, mask=None): generates at most `new_tokens` tokens per row from (B, L) ids,
# left-padded where the (B, L) mask is 0.
Generate = Callable[..., Run]


@dataclass(frozen=True)
class Contender:
    """Named way to generate; `batches` if it supports more than one row.

    `prepare` is an untimed call with the arguments of `run` before its first run. It returns the
    number of target forwards if counting them needs a call of its own. A contender that `compiles`
    takes minutes for new shapes, so its warm-up has the full length. The parts of `ours` are timed.
    """

    name: str
    run: Generate
    prepare: Callable[[Tensor, int, Tensor | None], int | None] | None = None
    batches: bool = True
    compiles: bool = False
    ours: bool = False


class BaselineOutputs:
    """Outputs of a contender, usually plain greedy `generate()`, cached per prompt."""

    def __init__(self, contender: Contender):
        self._contender = contender
        self._outputs: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def __call__(self, ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> list[list[int]]:
        """Return the generated tokens of each row of (B, L) ids, run one by one without padding."""
        mask = torch.ones_like(ids) if mask is None else mask
        outputs = []
        for row, visible in zip(ids, mask.bool(), strict=True):
            prompt = row[visible][None]
            key = tuple(prompt[0].tolist()), new_tokens
            if key not in self._outputs:
                run = self._contender.run(prompt, new_tokens, torch.ones_like(prompt))
                self._outputs[key] = run.sequence[prompt.shape[1] :].tolist()
            outputs.append(self._outputs[key])
        return outputs


def plain(model: PreTrainedModel, settings: Settings = GREEDY) -> Contender:
    """Return the baseline, plain `generate()`."""
    return transformers("plain", model, settings)


def compiled(model: PreTrainedModel, settings: Settings = GREEDY) -> Contender:
    """Return `generate()` with a static cache and transformers' compiled forward pass.

    Raises `UnsupportedError` if this model cannot be compiled here.
    """
    config = CompileConfig()
    # transformers compiles on a GPU by default; a CPU needs this switch.
    config._compile_all_devices = True  # type: ignore[assignment]
    if model.device.type == "cpu":
        config.mode = "default"
    options = {**settings, "cache_implementation": "static", "compile_config": config}

    def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        # A hook that counts forwards would trigger recompilation.
        sequences = _generate(model, ids, new_tokens, mask, **options)
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


@contextmanager
def without_stored_strategy(model: Any) -> Iterator[None]:
    """Disable a strategy in the model's generation config, which plain `generate()` would use."""
    config, stored = model.generation_config, model.generation_config.spec_strategy
    # Assigning None where it is unset would add an entry to the config, which is saved.
    if stored is None:
        yield
        return
    config.spec_strategy = None
    try:
        yield
    finally:
        config.spec_strategy = stored


def economize_lookup(
    model: PreTrainedModel, match_length: int, copy_length: int
) -> Contender | None:
    """Return the greedy lookup of the package `economize`, or None if it is not installed."""
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
        # Its decoding with counters does not stop at the end of a sequence.
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
    """Return one of our strategies."""

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
    """Generate once with the arguments in `method`, which select our engine; see `Generate`."""
    options = {**settings, **method, "return_dict_in_generate": True}
    output = _generate(model, ids, new_tokens, mask, **options)
    return Run(output.sequences, output.spec_stats.target_forwards, output.spec_stats)


def transformers(name: str, model: Any, settings: Settings, batches: bool = True) -> Contender:
    """Return a contender of transformers itself; a hook counts its forward passes."""

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


def _generate(model: Any, ids: Tensor, new_tokens: int, mask: Tensor | None, **options: Any) -> Any:
    if mask is not None:
        options["attention_mask"] = mask.to(model.device)
    return model.generate(ids.to(model.device), max_new_tokens=new_tokens, **options)


def _contender(model: Any, make_drafter: Callable[[Outputs], Drafter], name: str) -> Contender:
    """Return a contender whose drafter is made from the baseline's outputs in every generation."""
    baseline = BaselineOutputs(plain(model))

    def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        decode = partial(generate_with, make_drafter(baseline(ids, new_tokens, mask)))
        return speculative(model, ids, new_tokens, mask, custom_generate=decode)

    def prepare(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> None:
        # Records the outputs of new prompts untimed.
        baseline(ids, new_tokens, mask)

    return Contender(name, run, prepare, ours=True)


class OraclePolicy(LengthPolicy):
    """Length policy that stops after the first token that differs from the target's `outputs`.

    It is the upper bound of every length policy with the same draft model (Mamou et al. 2024, arXiv
    2405.04304, section 3).
    """

    def __init__(self, outputs: Outputs, max_draft_tokens: int = sys.maxsize):
        super().__init__(max_draft_tokens)
        self.outputs = outputs

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Return True for each token that equals the target's at its position."""
        targets = [self.outputs[token.row][token.position :][:1] for token in newest]
        return [list(t) == [token.token] for t, token in zip(targets, newest, strict=True)]


def oracle(model: Any, draft: PreTrainedModel) -> Contender:
    """Return chains of `draft`, which has the target's vocabulary, cut by `OraclePolicy`."""

    def drafter(outputs: Outputs) -> Drafter:
        return DraftModelDrafter(DraftConfig(), draft, OraclePolicy(outputs), num_embeddings(model))

    return _contender(model, drafter, "oracle")


class SyntheticDrafter(Drafter):
    """Chains of `length` correct tokens, each replaced by a wrong one with 1 - `acceptance`.

    This measures everything except drafting. The speed is an upper bound for a drafter with this
    acceptance, whose drafting time comes on top; every report must state that.
    """

    def __init__(self, outputs: Outputs, acceptance: float, length: int, vocab_size: int):
        self.outputs, self.acceptance = outputs, acceptance
        self.length, self.vocab_size = length, vocab_size

    def start(self, state: GenerationState) -> None:
        """Seed by the outputs, so that every repetition has the same errors."""
        self._random = random.Random(str(self.outputs))  # noqa: S311 - no secret

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Draft the next tokens of every unfinished row."""
        drafts = {}
        for row, limit in limits.items():
            begin = state.generated[row]
            end = begin + min(self.length, limit)
            chain = [
                token if self._random.random() < self.acceptance else (token + 1) % self.vocab_size
                for token in self.outputs[row][begin:end]
            ]
            drafts[row] = [state.tokens[row][-1], *chain], list(range(-1, len(chain)))
        return DraftTree.from_drafts(drafts, state.num_rows)


def synthetic(model: Any, acceptance: float, length: int) -> Contender:
    """Return chains of `length` tokens, each correct with probability `acceptance`."""
    vocab_size = model.config.get_text_config().vocab_size

    def drafter(outputs: Outputs) -> Drafter:
        return SyntheticDrafter(outputs, acceptance, length, vocab_size)

    return _contender(model, drafter, f"synthetic, {length} tokens, acceptance {acceptance:g}")
