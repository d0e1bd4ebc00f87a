"""What the configs of published heads leave open, family by family, and how a reading is tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.engine.forward.last_layer import BEFORE_NORM
from hf_spec.engine.forward.output import default_aux_layers
from hf_spec.methods.block.head import BlockHead
from hf_spec.methods.block.layouts import DFLASH, DSPARK
from hf_spec.methods.block.runner import BlockRunner
from hf_spec.methods.eagle.head import FAMILIES, Eagle1Head, EagleHead
from hf_spec.methods.eagle.spec import THETA
from hf_spec.methods.falcon.rank_stats import ranks_along

# (T, H) hidden states of a text, by their index.
States = Mapping[int, Tensor]
# Answers to one question: (option, value) pairs that differ from what the config says.
Question = list[tuple[str, Any]]


class OpenReadings(Protocol):
    """The readings of a family that are tried.

    Attributes:
        config: name of the class that has these options.
    """

    config: str

    def questions(self, own: Any, target: PreTrainedModel) -> Iterator[Question]:
        """What is open in the head `own`, which was read as its config says."""

    def agreed(self, head: Any, tokens: Sequence[int], states: States, starts: range) -> int:
        """How often the first draft after one of the places `starts` is the token there is."""


class EagleReadings:
    """Layers, the rotary base, the embedding and a norm of EAGLE heads."""

    config = "EagleConfig"

    def questions(self, own: EagleHead, target: PreTrainedModel) -> Iterator[Question]:
        """See `OpenReadings`."""
        text: Any = target.config.get_text_config()
        spec, depth = own.spec, text.num_hidden_layers
        # Earlier heads read the last state, and have no such norm.
        later = not isinstance(own, Eagle1Head)
        if later:
            layers = tuple(depth if i == BEFORE_NORM else i for i in spec.hidden_layers)
            usual = default_aux_layers(depth)
            yield _other_layers(layers, depth, [usual] if len(usual) == len(layers) else [])
        rope = getattr(text, "rope_parameters", None) or {}
        thetas = {THETA, float(rope.get("rope_theta") or THETA)}
        yield [("rope_theta", t) for t in sorted(thetas - {float(spec.rope["rope_theta"])})]
        yield [("embedding", way) for way in ("target", "own", "scaled") if way != spec.embedding]
        if later:
            yield [("norm_before_residual", not spec.norm_before_residual)]
            # Whether the feature that is handed on is normed shows in later drafts alone.

    def agreed(self, head: EagleHead, tokens: Sequence[int], states: States, starts: range) -> int:
        """See `OpenReadings`."""
        features = head.fuse([states[layer][:-1] for layer in head.hidden_layers])
        return int((ranks_along(head, tokens, features, list(starts), 1) == 0).sum())


class BlockReadings:
    """Layers, what an output drafts, and the factor of the embedding, of block heads."""

    config = "BlockConfig"

    def questions(self, own: BlockHead, target: PreTrainedModel) -> Iterator[Question]:
        """See `OpenReadings`."""
        text: Any = target.config.get_text_config()
        yield _other_layers(own.hidden_layers, text.num_hidden_layers)
        yield [("from_anchor", not own.shape.from_anchor)]
        scales = {1.0, float(text.hidden_size) ** 0.5} - {own.shape.embedding_scale}
        yield [("embedding_scale", scale) for scale in sorted(scales)]

    def agreed(self, head: BlockHead, tokens: Sequence[int], states: States, starts: range) -> int:
        """See `OpenReadings`."""
        runner, known, agreed = BlockRunner(head, 1), 0, 0
        with runner.active():
            for start in starts:
                new = slice(known, start)
                runner.learn(
                    {0: (known, start - known)}, [states[i][new] for i in head.hidden_layers]
                )
                known = start
                root = torch.tensor([tokens[start]], device=runner.device)
                proposals = runner.propose({0: tokens[start]}, 1)
                logits = proposals.after(root, torch.zeros_like(root))
                agreed += int(logits[0].argmax()) == tokens[start + 1]
        return agreed


def _other_layers(
    own: tuple[int, ...], depth: int, more: Sequence[tuple[int, ...]] = ()
) -> Question:
    """Indices off by one, which ids of the other way of counting are, and `more`."""
    ways = [*(tuple(i + step for i in own) for step in (1, -1)), *more]
    fit = [way for way in dict.fromkeys(ways) if all(0 <= i <= depth for i in way)]
    return [("aux_layers", way) for way in fit if way != own]


OPEN_READINGS: dict[str, OpenReadings] = {
    **dict.fromkeys(FAMILIES, EagleReadings()),
    **dict.fromkeys((DFLASH, DSPARK), BlockReadings()),
}
