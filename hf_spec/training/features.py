"""The target's features of whole texts, which heads read and predict.

A feature is the target's last hidden state, after the final norm; for heads that also read earlier
layers, their states are concatenated before it. Features are recorded with the answers, or computed
once by packed forward passes, and stored in bfloat16. They can also be computed in every step.
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
from hf_spec.engine.decode.drafter import NoDrafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput, default_aux_layers
from hf_spec.engine.runner import ModelRunner
from hf_spec.training.answers import (
    SHARD_RESPONSES,
    answer_batches,
    stored,
    target_facts,
    write_shard,
)
from hf_spec.training.responses import Response

# The hidden state after the final norm.
LAST = (-1,)
# Name of the files of features, and of the tensor in each.
FEATURES = "features"


@dataclass(frozen=True)
class Text:
    """A prompt with its answer, T tokens in total, and the target's features.

    `features` are (T - 1, n * H) bfloat16 on the host, h_0 to h_{T-2} of n layers; None if they are
    computed in every step. The token after the last one is unknown, so it has no feature.
    """

    response: Response
    features: Tensor | None = None


def fused_layers(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the layers whose states a fused head reads; the last one is the target's output."""
    return (*default_aux_layers(model.config.get_text_config().num_hidden_layers), *LAST)


def num_features(response: Response) -> int:
    """Return the number of features of a text: one per token except the last."""
    return response.num_tokens - 1


def disk_need(
    model: PreTrainedModel, responses: Sequence[Response], layers: Sequence[int] = LAST
) -> int:
    """Return the bytes that the bfloat16 features of `responses` take on disk."""
    width: int = model.config.get_text_config().hidden_size
    return sum(map(num_features, responses)) * len(layers) * width * 2


@torch.no_grad()
def text_features(
    model: PreTrainedModel, batch: Sequence[Response], layers: Sequence[int] = LAST
) -> list[Tensor]:
    """Return per text (T - 1, n * H), the concatenated hidden states of n `layers`.

    They are computed by one forward pass and stay on the model's device.
    """
    lines = [[*response.prompt, *response.response[:-1]] for response in batch]
    # All tokens but the last are pending, so the output layer runs for one token per text.
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
    """Return texts with the features of `layers`, computed if `folder` lacks them.

    The answers are in a fixed order; more may be appended between calls. `folder` takes `disk_need`
    bytes; features are read from it when they are used. Raises `OptionError` if the disk is too
    small, or `folder` was computed with another model, other layers or other answers.
    """
    need = disk_need(model, responses, layers)
    stored_bytes = sum(file.stat().st_size for file in folder.glob("*"))
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if need > free + stored_bytes:
        raise OptionError(
            f"the features need {in_words(need)} in {folder}, where {in_words(free)} are free: "
            "choose a folder on another disk, fewer answers, or compute them in every step "
            "(--no-store)"
        )

    def compute(shard: Sequence[Response]) -> dict[str, Tensor]:
        parts = [
            states.to(torch.bfloat16).cpu()
            for batch in answer_batches(shard, num_features)
            for states in text_features(model, batch, layers)
        ]
        return {FEATURES: torch.cat(parts)}

    facts = feature_facts(model, layers)
    passes = stored(folder, FEATURES, responses, facts, compute, num_features)
    return [Text(response, tensors[FEATURES]) for response, tensors in passes]


def features_of(layers: Sequence[int]) -> str:
    """Return the suffix of folders with the features of `layers`."""
    return FEATURES if len(layers) == 1 else f"{FEATURES}-of-{len(layers)}"


def feature_facts(model: PreTrainedModel, layers: Sequence[int]) -> dict[str, str]:
    """Return what features depend on besides the answers."""
    return {**target_facts(model), "layers": " ".join(map(str, layers))}


def in_words(size: int) -> str:
    """Return a number of bytes as text."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


class FeatureRecorder(NoDrafter):
    """Recorder of features in `folder`, which saves trainings a pass of the target over all texts.

    Every forward pass of a generation computes the features of its tokens. The files are those of
    `stored_texts`, which computes what is missing, such as the rest of a file that an interrupted
    run had started.
    """

    def __init__(self, target: PreTrainedModel, folder: Path, layers: Sequence[int] = LAST):
        self.hidden_layers = tuple(layers)
        self._facts = feature_facts(target, layers)
        self._folder = folder
        # Contents of the file that is being filled.
        self._answers: list[Response] = []
        self._features: list[Tensor] = []

    def start(self, state: GenerationState) -> None:
        """Discard the features of an earlier generation."""
        self._rows: list[int] = []
        self._states: list[Tensor] = []

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Record the features of all tokens that the target ran."""
        committed = output.committed_indices(verdict)
        indices = [index for row_indices in committed.values() for index in row_indices]
        states = [output.hidden[layer][indices] for layer in self.hidden_layers]
        self._states.append(torch.cat(states, dim=-1).to(torch.bfloat16).cpu())
        self._rows += [row for row, row_indices in committed.items() for _ in row_indices]

    def keep(self, answers: Sequence[Response], first: int) -> None:
        """Write the features of the latest generation, whose rows became `answers`.

        `first` is the index of the first answer in its file.
        """
        order = torch.tensor(self._rows).argsort(stable=True)
        features = torch.cat(self._states)[order].split(
            [num_features(answer) for answer in answers]
        )
        self._folder.mkdir(parents=True, exist_ok=True)
        for index, (answer, states) in enumerate(zip(answers, features, strict=True), start=first):
            if index % SHARD_RESPONSES == 0:
                self._answers, self._features = [], []
            elif not self._answers:
                # Another run wrote the beginning of this file.
                continue
            self._answers.append(answer)
            self._features.append(states)
            full = len(self._answers) == SHARD_RESPONSES
            if full or index + 1 == first + len(answers):
                tensors, shard = {FEATURES: torch.cat(self._features)}, index // SHARD_RESPONSES
                write_shard(self._folder, FEATURES, shard, self._answers, self._facts, tensors)
