"""Training of a head beside its target, for targets whose weights change."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import PreTrainedModel

from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.methods.loading import strategy_of
from hf_spec.methods.trainings import known_trainings
from hf_spec.training.features import num_features
from hf_spec.training.rollouts import OnlineTraining, RolloutRecorder
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import micro_batches, optimizer_step


class HeadRefresher:
    """Trains a head on what its target generates, for targets that are being trained themselves.

    Calls of `model.generate(..., assistant=assistant)` with the same `assistant` draft with the
    trained head and record their texts; each `refresh()` trains on those of the calls before. Only
    the head in memory changes, not its folder. Drafts never change the output.

    Args:
        model: the target.
        assistant: folder or Hub id of an EAGLE-3 head or a Falcon adapter, or its loaded module.
        learning_rate: of AdamW, constant.
        num_steps: optimizer steps of a `refresh()`. Each takes an equal share of the texts.
        batch_tokens: most tokens of a forward and backward pass, padding included.
        max_tokens: most tokens of recorded texts; the oldest texts are dropped first. A token takes
            two bytes per dimension and layer that the head reads.

    Raises:
        OptionError: if a number is not positive.
        AssistantError: if `assistant` cannot be trained, or is for another model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        assistant: Any,
        learning_rate: float = 1e-4,
        num_steps: int = 4,
        batch_tokens: int = 2048,
        max_tokens: int = 65_536,
    ):
        numbers = {"learning_rate": learning_rate, "num_steps": num_steps}
        for name, number in {**numbers, "max_tokens": max_tokens}.items():
            if not number > 0:
                raise OptionError(f"{name}={number!r} must be above 0")
        self._settings = TrainSettings(epochs=1, batch_tokens=batch_tokens)
        self._num_steps = num_steps
        self._online = online_training(model, assistant)
        head = self._online.head
        _leave_inference_mode(head)
        if getattr(head, "recorder", None) is not None:
            raise OptionError("the head has a HeadRefresher already; close() it first")
        self._recorder = RolloutRecorder(self._online.layers, max_tokens)
        head.recorder = self._recorder  # type: ignore[assignment]
        self._parameters = list(self._online.trained())
        # Half-precision weights would lose small steps.
        self._master = [parameter.detach().float() for parameter in self._parameters]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.num_refreshes = 0

    @property
    def head(self) -> nn.Module:
        """The trained head, which `assistant=` takes too."""
        return self._online.head

    def refresh(self) -> dict[str, float]:
        """Train on the texts recorded since the last call; return the mean loss and the tokens.

        Without texts nothing changes. With several processes, all of them must call it.
        """
        texts = self._recorder.take()
        accelerator = Accelerator(cpu=self._parameters[0].device.type == "cpu")
        self.num_refreshes += 1
        order = torch.randperm(
            len(texts), generator=torch.Generator().manual_seed(self.num_refreshes)
        )
        total, tokens = 0.0, 0
        with self._training():
            loss = self._online.make_loss()
            for step in range(self._num_steps):
                share = [texts[index] for index in order[step :: self._num_steps].tolist()]
                lengths = [num_features(text.response) for text in share]
                seed = self.num_refreshes * self._num_steps + step
                batches = micro_batches(share, lengths, replace(self._settings, seed=seed))(0)
                step_loss, step_tokens = optimizer_step(
                    accelerator, self._optimizer, self._parameters, map(loss, batches)
                )
                total, tokens = total + step_loss, tokens + step_tokens
        return {"loss": total / max(tokens, 1), "tokens": tokens}

    def close(self) -> None:
        """Stop recording. The head keeps its weights."""
        self._online.head.recorder = None  # type: ignore[assignment]
        self._recorder.take()

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Train the float32 weights inside the block; then round them to the head's dtype."""
        stored = [parameter.data for parameter in self._parameters]
        for parameter, master in zip(self._parameters, self._master, strict=True):
            parameter.data = master
            parameter.requires_grad_(True)
        self.head.train()
        try:
            with torch.inference_mode(False), torch.enable_grad():
                yield
        finally:
            self.head.eval()
            for parameter, data in zip(self._parameters, stored, strict=True):
                trained, parameter.data = parameter.data, data
                parameter.grad = None
                parameter.requires_grad_(False)
                with torch.no_grad():
                    # In place, which outdates packed copies.
                    parameter.copy_(trained)


def online_training(model: PreTrainedModel, assistant: Any) -> OnlineTraining:
    """Return how the method of an assistant trains it beside `model`.

    Raises:
        AssistantError: if its method has no such training, or it is for another model.
    """
    named = isinstance(assistant, (str, os.PathLike))
    strategy = strategy_of(os.fspath(assistant)) if named else getattr(assistant, "strategy", None)
    functions = {t.strategy: t.online for t in known_trainings() if t.online is not None}
    if strategy not in functions:
        raise AssistantError(
            f"assistant={assistant!r:.80} cannot be trained beside its target; pass one for "
            f"spec_strategy={' or '.join(map(repr, sorted(functions)))}"
        )
    module, _, name = functions[strategy].partition(":")
    training: OnlineTraining = getattr(importlib.import_module(module), name)(model, assistant)
    return training


def _leave_inference_mode(head: nn.Module) -> None:
    """Copy the weights of a head that was built in inference mode, which cannot be trained."""
    copies: dict[int, Any] = {}
    with torch.inference_mode(False):
        for module in head.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is None or not tensor.is_inference():
                        continue
                    if id(tensor) not in copies:
                        copy = tensor.clone()
                        parameter = isinstance(tensor, nn.Parameter)
                        copies[id(tensor)] = nn.Parameter(copy, False) if parameter else copy
                    tensors[name] = copies[id(tensor)]
