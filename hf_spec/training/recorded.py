"""Recording of the target's features while answers are generated.

Every forward pass computes the features of its tokens. Stored beside the answers, they save the
trainings of heads a pass of the target over all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.training.answers import SHARD_RESPONSES, write_shard
from hf_spec.training.features import FEATURES, LAST, feature_facts, num_features
from hf_spec.training.responses import Recorder, Response


class FeatureRecorder(Recorder):
    """Recorder that stores the features of the latest generation of `target` in `folder`.

    The files are those of `stored_texts` for `layers`, which computes what is missing, such as the
    rest of a file that an interrupted run had started.
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
        """Write the features of the latest generation."""
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
                self._write(index // SHARD_RESPONSES)

    def _write(self, index: int) -> None:
        tensors = {FEATURES: torch.cat(self._features)}
        write_shard(self._folder, FEATURES, index, self._answers, self._facts, tensors)
