"""Options of published heads that their configs leave ambiguous, by family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

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

# (T, H) hidden states of a text, by layer index.
States = Mapping[int, Tensor]
# (option, value) pairs, the alternatives to the config's value of one option.
Alternatives = list[tuple[str, Any]]


class AmbiguousConfig(ABC):
    """Ambiguous options of a family of heads.

    Attributes:
        config: name of the config class that has these options.
    """

    config: str

    @abstractmethod
    def alternatives(self, head: Any, target: PreTrainedModel) -> Iterator[Alternatives]:
        """Yield the alternatives of each ambiguous option of `head`, loaded as its config says."""

    @abstractmethod
    def num_agreed(self, head: Any, tokens: Sequence[int], states: States, starts: range) -> int:
        """Return how many first drafts after the positions `starts` equal the next token."""


class AmbiguousEagleConfig(AmbiguousConfig):
    """Layers, rotary base, embedding and norm of EAGLE heads."""

    config = "EagleConfig"

    def alternatives(self, head: EagleHead, target: PreTrainedModel) -> Iterator[Alternatives]:
        """See `AmbiguousConfig`."""
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
        yield [
            ("embedding", kind) for kind in ("target", "own", "scaled") if kind != spec.embedding
        ]
        if later:
            yield [("norm_before_residual", not spec.norm_before_residual)]
            # `norm_output` changes only later drafts, which are not compared.

    def num_agreed(
        self, head: EagleHead, tokens: Sequence[int], states: States, starts: range
    ) -> int:
        """See `AmbiguousConfig`."""
        features = head.fuse([states[layer][:-1] for layer in head.hidden_layers])
        return int((ranks_along(head, tokens, features, list(starts), 1) == 0).sum())


class AmbiguousBlockConfig(AmbiguousConfig):
    """Layers, position drafted by an output, and embedding scale of block heads."""

    config = "BlockConfig"

    def alternatives(self, head: BlockHead, target: PreTrainedModel) -> Iterator[Alternatives]:
        """See `AmbiguousConfig`."""
        text: Any = target.config.get_text_config()
        yield _other_layers(head.hidden_layers, text.num_hidden_layers)
        yield [("from_anchor", not head.shape.from_anchor)]
        scales = {1.0, float(text.hidden_size) ** 0.5} - {head.shape.embedding_scale}
        yield [("embedding_scale", scale) for scale in sorted(scales)]

    def num_agreed(
        self, head: BlockHead, tokens: Sequence[int], states: States, starts: range
    ) -> int:
        """See `AmbiguousConfig`."""
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


AMBIGUOUS_CONFIGS: dict[str, AmbiguousConfig] = {
    **dict.fromkeys(FAMILIES, AmbiguousEagleConfig()),
    **dict.fromkeys((DFLASH, DSPARK), AmbiguousBlockConfig()),
}
