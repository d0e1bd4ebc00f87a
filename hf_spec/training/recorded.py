"""The target's features of answers, kept while these are written.

Every forward of a generation computes the features of the tokens that it runs. Kept beside the
answers, they spare the trainings of heads a pass of the target over all texts, which costs nearly
what writing them did.
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
    """Drafts nothing, and keeps the features of the newest generation of `target` in `folder`.

    They are those that `stored_texts` would compute there of `layers`, in the same files; it
    computes what is missing, such as the rest of a file that an interrupted run had begun.
    """

    def __init__(self, target: PreTrainedModel, folder: Path, layers: Sequence[int] = LAST):
        self.hidden_layers = tuple(layers)
        self._facts = feature_facts(target, layers)
        self._folder = folder
        # Of the file that is being filled.
        self._answers: list[Response] = []
        self._features: list[Tensor] = []

    def start(self, state: GenerationState) -> None:
        """Forget what an earlier generation had."""
        self._rows: list[int] = []
        self._states: list[Tensor] = []

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Take the features of all tokens that were run."""
        kept = output.committed_indices(verdict)
        places = [place for mine in kept.values() for place in mine]
        states = [output.hidden[layer][places] for layer in self.hidden_layers]
        self._states.append(torch.cat(states, dim=-1).to(torch.bfloat16).cpu())
        self._rows += [row for row, mine in kept.items() for _ in mine]

    def keep(self, answers: Sequence[Response], first: int) -> None:
        """Write the features of the newest generation."""
        order = torch.tensor(self._rows).argsort(stable=True)
        features = torch.cat(self._states)[order].split([num_features(one) for one in answers])
        self._folder.mkdir(parents=True, exist_ok=True)
        for place, (answer, states) in enumerate(zip(answers, features, strict=True), start=first):
            if place % SHARD_RESPONSES == 0:
                self._answers, self._features = [], []
            elif not self._answers:
                # The beginning of this file was written in another run.
                continue
            self._answers.append(answer)
            self._features.append(states)
            full = len(self._answers) == SHARD_RESPONSES
            if full or place + 1 == first + len(answers):
                self._write(place // SHARD_RESPONSES)

    def _write(self, index: int) -> None:
        tensors = {FEATURES: torch.cat(self._features)}
        write_shard(self._folder, FEATURES, index, self._answers, self._facts, tensors)
