"""The target's features of whole texts: what heads read and predict.

A feature is the target's last hidden state, after the final norm; heads that read earlier layers
too get those before it, one after the other. They are computed once by the engine's packed forward
and kept on disk in bfloat16, or again for every micro-batch where the disk is small and the target
is fast.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.common.errors import OptionError
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.output import default_aux_layers
from hf_spec.engine.runner import ModelRunner
from hf_spec.training.answers import answer_batches, known_target, stored
from hf_spec.training.responses import Response

BYTES = 2  # of a bfloat16
# The hidden state after the final norm.
LAST = (-1,)
# Of the files of features, and of the tensor in each.
FEATURES = "features"


@dataclass(frozen=True)
class Text:
    """A prompt with its answer, T tokens together, and what the target thought of them.

    Attributes:
        response: prompt and answer.
        features: (T - 1, n * H) bfloat16 on the host, h_0 to h_{T-2} of n layers; None if they are
            computed when needed. The feature of the last token predicts nothing that is known.
    """

    response: Response
    features: Tensor | None = None


def fused_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Whose states a head that fuses them reads, and last the one that the target's own reads."""
    return (*default_aux_layers(model.config.get_text_config().num_hidden_layers), *LAST)


def num_features(response: Response) -> int:
    """Features of a text: one a token but the last."""
    return response.num_tokens - 1


def disk_need(
    model: PreTrainedModel, responses: Sequence[Response], layers: Sequence[int] = LAST
) -> int:
    """Bytes that the features of `responses` take on disk."""
    width: int = model.config.get_text_config().hidden_size
    return sum(map(num_features, responses)) * len(layers) * width * BYTES


@torch.no_grad()
def text_features(
    model: PreTrainedModel, batch: Sequence[Response], layers: Sequence[int] = LAST
) -> list[Tensor]:
    """(T - 1, n * H) hidden states of n `layers`, one after the other, of every text.

    They are on the model's device, and computed by one forward.
    """
    lines = [[*response.prompt, *response.response[:-1]] for response in batch]
    # All tokens but the last are pending, so the head is run for one token a text.
    tree = DraftTree.from_rows([(line[-1:], [-1]) for line in lines])
    runner = ModelRunner(model, len(lines), hidden_layers=tuple(layers))
    with runner.active():
        output = runner.forward(tree, lines)
    hidden = torch.cat([output.hidden[layer] for layer in layers], dim=-1)
    return [hidden[[*output.pending.get(r, []), node]] for r, node in enumerate(output.nodes)]


def stored_texts(
    model: PreTrainedModel,
    responses: Sequence[Response],
    folder: Path,
    layers: Sequence[int] = LAST,
) -> list[Text]:
    """Texts with the features of `layers`, computed where `folder` does not hold them yet.

    The answers are in a fixed order, more may be appended between calls. The features take
    `disk_need` bytes of `folder`, stay there and are read when they are used.

    Raises:
        OptionError: if the disk is too small, or `folder` was made from another model, other layers
            or other answers.
    """
    need = disk_need(model, responses, layers)
    there = sum(file.stat().st_size for file in folder.glob("*"))
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if need > free + there:
        raise OptionError(
            f"the features need {in_words(need)} in {folder}, where {in_words(free)} are free: "
            "choose a folder on another disk, fewer answers, or compute them as they are needed "
            "(--no-store)"
        )

    def compute(shard: Sequence[Response]) -> dict[str, Tensor]:
        batches = answer_batches(shard, num_features)
        parts = [
            states.to(torch.bfloat16).cpu()
            for batch in batches
            for states in text_features(model, batch, layers)
        ]
        return {FEATURES: torch.cat(parts)}

    facts = feature_facts(model, layers)
    passes = stored(folder, FEATURES, responses, facts, compute, num_features)
    return [Text(response, found[FEATURES]) for response, found in passes]


def features_of(layers: Sequence[int]) -> str:
    """The ending of folders with the features of `layers`."""
    return FEATURES if len(layers) == 1 else f"{FEATURES}-of-{len(layers)}"


def feature_facts(model: PreTrainedModel, layers: Sequence[int]) -> dict[str, str]:
    """What features depend on beside the answers."""
    return {**known_target(model), "layers": " ".join(map(str, layers))}


def in_words(size: int) -> str:
    """A number of bytes for people."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
