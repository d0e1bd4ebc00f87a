"""Choice of a published head's layout by its agreement with the target (`hf-spec check-head`).

A head that is loaded with a wrong layout raises no error; it only drafts worse. For each option
that its config leaves ambiguous, the value whose first drafts agree most often with the target's
own tokens is chosen. It replaces the config's value only if the difference is larger than chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedHead, read_published
from hf_spec.common.errors import AssistantError
from hf_spec.engine.forward.last_layer import BEFORE_NORM, LastLayer
from hf_spec.engine.forward.output import default_aux_layers
from hf_spec.evaluation.lossless.sampling import generate_after
from hf_spec.methods.block.head import BlockHead
from hf_spec.methods.block.layouts import FAMILIES as BLOCK_FAMILIES
from hf_spec.methods.block.runner import BlockRunner
from hf_spec.methods.eagle.head import FAMILIES, Eagle1Head, EagleHead
from hf_spec.methods.eagle.spec import THETA
from hf_spec.methods.falcon.rank_stats import ranks_along
from hf_spec.methods.loading import build_published

# Standard errors by which a layout must be better than that of the config.
BETTER_BY = 2.0

Overrides = tuple[tuple[str, Any], ...]
# (T, H) hidden states of a text, by layer index.
States = Mapping[int, Tensor]
# (option, value) pairs, the alternatives to the config's value of one option.
Alternatives = list[tuple[str, Any]]


@dataclass(frozen=True)
class Agreement:
    """Agreement of a head's first drafts with the target's next token under one layout.

    `config_overrides` are (option, value) pairs that replace values of the config, whose class is
    `config`. `agreed` of `compared` first drafts are equal.
    """

    config_overrides: Overrides
    agreed: int
    compared: int
    config: str = ""

    @property
    def share(self) -> float:
        """Share of first drafts that agree."""
        return self.agreed / max(self.compared, 1)

    @property
    def standard_error(self) -> float:
        """Standard error of `share`, at least that of one token."""
        count = max(self.compared, 1)
        return max(math.sqrt(self.share * (1 - self.share) / count), 1 / count)


@dataclass(frozen=True)
class Texts:
    """Token ids of texts, and the positions at which the target's answers begin."""

    tokens: list[list[int]]
    begins: list[int]


@torch.no_grad()
def target_answers(target: Any, prompts: Sequence[Tensor], num_tokens: int) -> Texts:
    """Return plain greedy outputs for (1, L) prompts, at least `num_tokens` tokens in all."""
    each = -(-num_tokens // len(prompts))
    texts = Texts([], [])
    for prompt in prompts:
        ids = prompt.to(target.device)
        output = generate_after(target, ids, each, do_sample=False, num_beams=1)
        texts.tokens.append(output.sequences[0].tolist())
        texts.begins.append(prompt.shape[1])
    return texts


def read_ambiguous_head(name: str) -> PublishedHead:
    """Read a published head from a folder or repository.

    Raises `AssistantError` if it is not a published head, or its family has no ambiguous options.
    """
    published = read_published(name)
    if published is None or published.family not in _AMBIGUOUS:
        what = "not a published head" if published is None else f"a {published.family!r} head"
        raise AssistantError(
            f"{name!r} is {what}; only heads of these families have an ambiguous layout: "
            f"{', '.join(_AMBIGUOUS)}"
        )
    return published


def choose_layout(
    published: PublishedHead,
    target: PreTrainedModel,
    texts: Texts,
    report: Callable[[Agreement], None],
) -> Agreement:
    """Try the layouts of a head (from `read_ambiguous_head`) and return the best one.

    `report` is called with each agreement, first with that of the unchanged config. Raises
    `AssistantError` if the head does not fit the target.
    """
    alternatives, num_agreed, config = _AMBIGUOUS[published.family]
    states = _all_states(target, texts)

    @torch.no_grad()
    def measure(overrides: Overrides) -> Agreement:
        head = build_published(replace(published, overrides=overrides), target)
        agreed = compared = 0
        for tokens, begin, text_states in zip(texts.tokens, texts.begins, states, strict=True):
            # The draft after position p predicts token p + 1.
            starts = range(max(begin - 1, 1), len(tokens) - 1)
            agreed += num_agreed(head, tokens, text_states, starts)
            compared += len(starts)
        return Agreement(overrides, agreed, compared, config)

    best = measure(())
    report(best)
    for overrides in alternatives(build_published(published, target), target):
        tried = []
        for override in overrides:
            try:
                tried.append(measure((*best.config_overrides, override)))
            except AssistantError:
                # Its tensors do not have this layout.
                continue
            report(tried[-1])
        winner = max(tried, key=lambda agreement: agreement.agreed, default=best)
        if winner.share > best.share + BETTER_BY * best.standard_error:
            best = winner
    return best


@torch.no_grad()
def _all_states(target: PreTrainedModel, texts: Texts) -> list[States]:
    """Return per text the (T, H) states of every layer index, and those before the norm."""
    all_states: list[States] = []
    last = LastLayer(target)
    with last.watched():
        for tokens in texts.tokens:
            ids = torch.tensor([tokens], device=target.device)
            hidden = target(ids, output_hidden_states=True, use_cache=False).hidden_states
            states = {index: state[0] for index, state in enumerate(hidden)}
            all_states.append({**states, -1: hidden[-1][0], BEFORE_NORM: last.take()[0]})
    return all_states


def _eagle_alternatives(head: EagleHead, target: PreTrainedModel) -> Iterator[Alternatives]:
    text: Any = target.config.get_text_config()
    spec, depth = head.spec, text.num_hidden_layers
    # EAGLE-1 heads use the last state and have no such norm.
    later = not isinstance(head, Eagle1Head)
    if later:
        layers = tuple(depth if i == BEFORE_NORM else i for i in spec.hidden_layers)
        usual = default_aux_layers(depth)
        yield _other_layers(layers, depth, [usual] if len(usual) == len(layers) else [])
    rope = getattr(text, "rope_parameters", None) or {}
    thetas = {THETA, float(rope.get("rope_theta") or THETA)}
    yield [("rope_theta", t) for t in sorted(thetas - {float(spec.rope["rope_theta"])})]
    yield [("embedding", kind) for kind in ("target", "own", "scaled") if kind != spec.embedding]
    if later:
        yield [("norm_before_residual", not spec.norm_before_residual)]
        # `norm_output` changes only later drafts, which are not compared.


def _eagle_agreed(head: EagleHead, tokens: Sequence[int], states: States, starts: range) -> int:
    features = head.fuse([states[layer][:-1] for layer in head.hidden_layers])
    return int((ranks_along(head, tokens, features, list(starts), 1) == 0).sum())


def _block_alternatives(head: BlockHead, target: PreTrainedModel) -> Iterator[Alternatives]:
    text: Any = target.config.get_text_config()
    yield _other_layers(head.hidden_layers, text.num_hidden_layers)
    yield [("from_anchor", not head.shape.from_anchor)]
    scales = {1.0, float(text.hidden_size) ** 0.5} - {head.shape.embedding_scale}
    yield [("embedding_scale", scale) for scale in sorted(scales)]


def _block_agreed(head: BlockHead, tokens: Sequence[int], states: States, starts: range) -> int:
    runner, learned, agreed = BlockRunner(head, 1), 0, 0
    with runner.active():
        for start in starts:
            new = slice(learned, start)
            runner.learn(
                {0: (learned, start - learned)}, [states[i][new] for i in head.hidden_layers]
            )
            learned = start
            root = torch.tensor([tokens[start]], device=runner.device)
            proposals = runner.propose({0: tokens[start]}, 1)
            logits = proposals.after(root, torch.zeros_like(root))
            agreed += int(logits[0].argmax()) == tokens[start + 1]
    return agreed


def _other_layers(
    layers: tuple[int, ...], depth: int, more: Sequence[tuple[int, ...]] = ()
) -> Alternatives:
    """Return the layers shifted by 1 and -1 (ids and indices differ by one), and `more`."""
    choices = [*(tuple(i + step for i in layers) for step in (1, -1)), *more]
    valid = [choice for choice in dict.fromkeys(choices) if all(0 <= i <= depth for i in choice)]
    return [("aux_layers", choice) for choice in valid if choice != layers]


# Family -> alternatives of each ambiguous option of a head that is loaded as its config says,
# number of first drafts after the positions `starts` that equal the next token, config class.
_AMBIGUOUS: dict[str, tuple[Callable[..., Any], Callable[..., int], str]] = {
    **dict.fromkeys(FAMILIES, (_eagle_alternatives, _eagle_agreed, "EagleConfig")),
    **dict.fromkeys(BLOCK_FAMILIES, (_block_alternatives, _block_agreed, "BlockConfig")),
}
