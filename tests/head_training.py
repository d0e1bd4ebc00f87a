"""Checks shared by the training tests of all published heads."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.published import known_head
from hf_spec.training.features import Text
from hf_spec.training.responses import Response
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import METRICS

RUN = TrainSettings(epochs=30, batch_tokens=100, learning_rate=0.01, evaluate_every=10)

# Trains a head into a folder.
Train = Callable[[Path, TrainSettings], dict[str, float]]


def rows(folder: Path) -> list[dict[str, float]]:
    lines = (folder / "training" / METRICS).read_text().splitlines()
    return [json.loads(line) for line in lines]


def twice(texts: Sequence[Text]) -> list[Text]:
    """Return the texts under two ids each, so that the held-out texts are also trained on."""
    again = [
        replace(text, response=replace(text.response, id=f"again {index}"))
        for index, text in enumerate(texts)
    ]
    return [*texts, *again]


def generate(model: PreTrainedModel, response: Response, strategy: Any, head: Any) -> Any:
    """Check that generation with a head yields the same response, and return its statistics."""
    out = model.generate(
        torch.tensor([response.prompt]),
        max_new_tokens=len(response.response),
        do_sample=False,
        return_dict_in_generate=True,
        spec_strategy=strategy,
        assistant=str(head),
    )
    assert out.sequences[0, len(response.prompt) :].tolist() == response.response
    return out.spec_stats


def tau(model: PreTrainedModel, texts: Sequence[Text], strategy: str, head: Path) -> float:
    """Return the accepted tokens per target forward pass of `model.generate()`."""
    stats = [generate(model, text.response, strategy, head) for text in texts]
    return sum(s.accepted_tokens for s in stats) / sum(s.target_forwards for s in stats)


def check_learning(
    model: PreTrainedModel,
    texts: Sequence[Text],
    train: Train,
    strategy: str,
    folder: Path,
    run: TrainSettings = RUN,
) -> None:
    """Check that training lowers the loss, and raises tau in the metrics and in `generate()`."""
    train(folder / "untrained", replace(run, epochs=1, learning_rate=0.0))
    figures = train(folder / "head", run)
    metrics = rows(folder / "head")
    losses = [row["loss"] for row in metrics]
    assert sum(losses[-5:]) < sum(losses[:5]) - 1
    taus = [row["tau"] for row in metrics if "tau" in row]
    assert taus[-1] > taus[0] + 0.2
    assert figures.items() <= metrics[-1].items()
    before, after = (
        tau(model, texts[:4], strategy, folder / name) for name in ("untrained", "head")
    )
    assert after > before + 0.2
    card = (folder / "head" / "README.md").read_text()
    assert f"| `tau` | {figures['tau']:.4f} |" in card
    assert f"spec_strategy={strategy!r}, assistant='head'" in card
    record = known_head(folder / "head").config["hf_spec"]
    assert record["held_back"] == figures
    assert record["training"]["epochs"] == run.epochs


def check_resuming(train: Train, loss: type, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that an interrupted and resumed training writes the head of an uninterrupted one."""
    run = replace(RUN, epochs=2, save_every=1)
    train(folder / "whole", run)
    original, calls = loss.__call__, 0

    def interrupted(self: Any, batch: Any) -> tuple[Tensor, int]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return original(self, batch)

    monkeypatch.setattr(loss, "__call__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(folder / "resumed", run)
    assert not (folder / "resumed" / "config.json").exists()
    train(folder / "resumed", run)
    assert calls == len(rows(folder / "whole")) + 1
    whole, resumed = (known_head(folder / name).tensors for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())


def computed(texts: Sequence[Text]) -> list[Text]:
    """Return the texts without stored features, which are then computed in float32."""
    return [Text(text.response) for text in texts]


@torch.no_grad()
def states_and_probs(
    model: PreTrainedModel, tokens: Sequence[int], vocabulary: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    """Return a text's hidden states and (T, R) next-token distributions over a vocabulary."""
    out = model(torch.tensor([list(tokens)]), output_hidden_states=True)
    logits = out.logits[0] if vocabulary is None else out.logits[0][:, vocabulary]
    return tuple(state[0] for state in out.hidden_states), logits.softmax(-1)


def entropy(probs: Tensor, logits: Tensor) -> float:
    return float(-(probs * logits.detach().log_softmax(-1)).sum())
