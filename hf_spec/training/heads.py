"""Training of heads that are written as published heads: one run, its record, and its card.

A method adds the head, its loss, and the layout of its files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import base_name, is_hub_id
from hf_spec.adapters.card import GENERATED
from hf_spec.adapters.published import (
    PublishedHead,
    known_head,
    speculators_entries,
    write_published,
)
from hf_spec.common.errors import OptionError
from hf_spec.training.answers import learned_from
from hf_spec.training.features import Text, num_features
from hf_spec.training.held_out import acceptance, learned_and_held
from hf_spec.training.job import TrainingJob, TrainingResult
from hf_spec.training.pairs import cut_prompt
from hf_spec.training.settings import HeadSettings, TrainSettings
from hf_spec.training.trainer import Loss, MicroBatch, micro_batches, processes, train

# Texts per forward pass of the evaluation.
EVALUATION_BATCH = 8
# Standard deviation of weights without a counterpart in the target, as in transformers.
INIT_STD = 0.02


class HeadLoss(Protocol):
    """Loss of a head on texts, and its drafts on them."""

    def __call__(self, batch: MicroBatch[Text]) -> Loss:
        """Return the summed loss of a micro-batch and its number of tokens."""

    def matches(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return per text (answer tokens, draft tokens) bool: correct tokens of greedy drafts."""


@dataclass(frozen=True)
class CardText:
    """Names in a trained head's card: its kind, the layout of its files, and how it is used."""

    title: str
    command: str
    layout: str
    tag: str
    strategy: str


class HeadRun:
    """One training of a head on a frozen target's answers.

    Raises `OptionError` if the training or the held-out set is empty.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        texts: Sequence[Text],
        settings: HeadSettings,
        run: TrainSettings,
        start: PublishedHead | None = None,
    ):
        self.model, self.settings, self.run = model, settings, run
        self.learned, self.held = learned_and_held(texts, settings.held_back, "texts")
        # The name only: a published head must not carry local paths.
        started = None if start is None else Path(start.name).name
        self.record = {**asdict(settings), "texts": len(texts), "start": started}
        self._sources = learned_from(model, [text.response for text in texts])
        self.metrics: dict[str, float] = {}

    def train(
        self, trained: Mapping[str, nn.Parameter], loss: HeadLoss, folder: Path
    ) -> dict[str, float]:
        """Train the parameters; return the metrics on the held-out texts, see `acceptance`.

        Checkpoint and metrics are written to the folder `training` in `folder`.
        """
        for parameter in trained.values():
            parameter.requires_grad_(True)
        context = self.settings.max_context
        lengths = [num_features(t.response) - cut_prompt(t.response, context) for t in self.learned]
        epochs = micro_batches(self.learned, lengths, self.run)
        facts = {**self.record, **self._sources}

        def evaluate() -> dict[str, float]:
            return self.evaluate(loss)

        log = folder / "training"
        with _frozen(self.model):
            self.metrics = train(trained, loss, epochs, self.run, log, evaluate, facts)
        return self.metrics

    def evaluate(self, loss: HeadLoss) -> dict[str, float]:
        """Return the metrics on the held-out texts."""
        starts = range(0, len(self.held), EVALUATION_BATCH)
        batches = [self.held[start : start + EVALUATION_BATCH] for start in starts]
        return acceptance([match for batch in batches for match in loss.matches(batch)])

    def write(
        self, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], card: CardText
    ) -> None:
        """Write the head with its record and card, in the main process."""
        if processes().is_main_process:
            record = {"training": {**self.record, **self.run.recorded}, "held_back": self.metrics}
            text = _card(card, base_name(self.model), folder, self.metrics)
            write_published(folder, {**config, "hf_spec": record}, tensors, text)


def run_head_training(
    job: TrainingJob,
    layers: Sequence[int],
    train: Callable[..., Mapping[str, float]],
    check_start: Callable[[PublishedHead, PreTrainedModel, Any], object],
) -> TrainingResult:
    """Run `train` on the answers of a job, with the target's features of `layers`.

    `check_start` raises an error if the head to start from does not fit.
    """
    start = None if job.options.init is None else known_head(job.options.init)
    if start is not None:
        # Computing the features takes long.
        check_start(start, job.target, job.settings)
    texts = job.texts(layers)
    return TrainingResult(train(job.target, texts, job.out, job.settings, job.run, start))


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Compute no gradients for the weights of a model, which heads share."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad_(True)


def layer_config(model: PreTrainedModel, mlp_size: int | None, num_layers: int) -> dict[str, Any]:
    """Return sizes and rotary base of layers like those of the target."""
    config: Any = model.config.get_text_config()
    heads = config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": mlp_size or config.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_theta": (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0),
        "max_position_embeddings": config.max_position_embeddings,
    }


def as_stored(trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return trained weights in bfloat16, in which heads are published."""
    return {name: weight.detach().bfloat16() for name, weight in trained.items()}


def draft_vocab_tensors(vocabulary: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """Return "d2t" and "t2d" of a (R,) draft vocabulary; nothing for the whole vocabulary."""
    if vocabulary is None:
        return {}
    ids = vocabulary.cpu()
    drafted = ids.new_zeros(vocab_size).bool()
    drafted[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": drafted}


def speculators_config(algorithm: str, model: PreTrainedModel, num_tokens: int) -> dict[str, Any]:
    """Return the config entries that all heads in the layout of speculators have."""
    return speculators_entries(algorithm, base_name(model), (type(model).__name__,), num_tokens)


def check_family(start: PublishedHead, families: Sequence[str]) -> None:
    """Raise `OptionError` if the head to start from is of another family."""
    if start.family not in families:
        raise OptionError(
            f"the head to start from, {start.name!r}, is of the family {start.family!r}, not "
            + " or ".join(map(repr, families))
        )


def falling_weights(base: float, num_levels: int) -> list[float]:
    """Return the weights base^0, base^1, ... of draft levels; they sum to 1."""
    weights = [base**level for level in range(num_levels)]
    return [weight / sum(weights) for weight in weights]


def _card(card: CardText, base: str, folder: Path, metrics: Mapping[str, float]) -> str:
    """Return the model card."""
    rows = "\n".join(f"| `{name}` | {value:.4f} |" for name, value in metrics.items())
    options = f"spec_strategy={card.strategy!r}, assistant={folder.name!r}"
    return f"""---
{f"base_model: {base}" if is_hub_id(base) else "library_name: hf_spec"}
tags:
- speculative-decoding
- {card.tag}
---

{GENERATED}

# {card.title} for {base}

Written by `hf-spec train {card.command}` in the layout of {card.layout};
see `config.json` for options.

```python
import hf_spec  # adds spec_strategy= and assistant= to generate()

model.generate(**inputs, {options}, max_new_tokens=64)
```

## Held-out texts

| | |
|---|---|
{rows}
"""
