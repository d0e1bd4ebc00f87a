"""Training of DISCO's classifier on the target's own answers (`hf-spec train disco`).

At every position of an answer the draft model predicts one token after the target's own text. The
token is accepted if it equals the target's (Mamou et al. 2024, arXiv 2405.04304, appendix D.1). So
the data contains no draft that has already gone wrong. Labels are

- `hard`: 1 if the draft model's most probable token is the target's token, else 0;
- `soft`: 1 - TV(draft, target), the probability that residual rejection accepts a sampled token.

The paper does not specify how its labels relate to the total variation distance that it mentions.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_spec.adapters.folder import BaseModel, SpecAdapter
from hf_spec.common.errors import OptionError
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.disco.classifier import METHOD, DiscoClassifier, draft_features
from hf_spec.methods.disco.drafter import find_draft_model
from hf_spec.methods.disco.settings import DiscoTrainSettings
from hf_spec.methods.draft_model.loading import resolve_draft_model
from hf_spec.methods.draft_model.truncated import named_layers
from hf_spec.training.answers import answer_batches, answer_logits, stored
from hf_spec.training.held_out import split_by_seed
from hf_spec.training.job import ResultTable, TrainingJob, TrainingResult
from hf_spec.training.responses import Response
from hf_spec.training.trainer import processes, record_start, save_trained

# Positions whose float32 distributions are computed at once.
CHUNK_TOKENS = 128

STATIC_LENGTHS = tuple(range(1, 11))
CONFIDENCE_THRESHOLD = 0.4

# A draft model, its name (as for `assistant=`), or {"truncated": layers}.
DraftSpec = PreTrainedModel | str | dict[str, int]


@dataclass(frozen=True)
class Observed:
    """Draft model predictions at the T positions of one answer to the prompt `id`.

    Attributes:
        features: (T, 12) float32, see `draft_features`.
        matched: (T,) bool, True where the most probable draft token is the target's.
        labels: (T,) float32 labels for training.
    """

    id: str
    features: Tensor
    matched: Tensor
    labels: Tensor


def run_training(job: TrainingJob) -> TrainingResult:
    """Run `hf-spec train disco`."""
    draft, layers = job.options.draft, job.options.draft_layers
    if (draft is None) == (layers is None):
        raise OptionError("give either --draft or --draft-layers")
    named: DraftSpec = draft if draft is not None else {"truncated": layers}
    answers, tasks = job.answers(), job.options.tasks or None
    adapter = train_disco(job.target, named, answers, job.out, job.settings, tasks)
    validation = adapter.options["validation"]
    rows = [
        (rule, name, *(f"{figures[key]:.2f}" for key in ("precision", "recall", "f1")))
        for rule, classes in validation["rules"].items()
        for name, figures in classes.items()
    ]
    title = f"{validation['acceptance']:.0%} of the held-out positions are accepted"
    columns = ("rule", "class", "precision", "recall", "F1")
    return TrainingResult(validation, ResultTable(title, columns, rows))


def train_disco(
    model: PreTrainedModel,
    draft: DraftSpec,
    responses: Sequence[Response],
    folder: Path,
    settings: DiscoTrainSettings,
    tasks: Sequence[str] | None = None,
) -> SpecAdapter:
    """Train a classifier for a target and a draft model, and write its adapter to `folder`.

    Observations are cached in `folder / "training"`, from where an interrupted run resumes. The
    name of the draft model is stored in the adapter; a folder is stored relative to `folder` and
    must be beside or inside it. `responses` are greedy answers, of which `tasks` may select some.

    Raises:
        OptionError: if there are too few answers, or `folder` contains another run.
        AssistantError: if the draft model cannot be loaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft_model, draft_name = _load_draft(draft, folder, model)
    chosen = [r for r in responses if r.response and (tasks is None or r.task in tasks)]
    ids = [response.id for response in chosen]
    training_ids, held_out_ids = split_by_seed(ids, settings.validation_share, settings.seed)
    (folder / "training").mkdir(exist_ok=True)
    # Training takes seconds, so all processes do it; the slow observation is computed once.
    with processes().main_process_first():
        if processes().is_main_process:
            record_start(folder / "training", asdict(settings), 0, model.device)
        observed = observe(model, draft_model, chosen, folder / "training", settings.labels)
    training = [o for o in observed if o.id in training_ids]
    held_out = [o for o in observed if o.id in held_out_ids]
    classifier, history = fit(training, held_out, settings)
    adapter = classifier.to_adapter(
        BaseModel.of(model),
        draft=draft_name,
        threshold=settings.threshold,
        max_draft_tokens=settings.max_draft_tokens,
        training={
            **asdict(settings),
            "tasks": sorted({r.task for r in chosen}),
            "prompts": len(training_ids),
            "positions": sum(len(o.labels) for o in training),
            "validation_loss": history,
        },
        validation_prompts=sorted(held_out_ids),
        validation=evaluate(classifier, held_out, settings.threshold),
    )
    return save_trained(folder, adapter)


def observe(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    responses: Sequence[Response],
    folder: Path,
    labels: str,
) -> list[Observed]:
    """Return the draft model's predictions at every position of `responses`, cached in `folder`.

    The target runs only if `labels` is "soft". Observations of other models, labels or responses in
    `folder` raise `OptionError`.
    """
    facts = {"draft": _digest(draft), "target": _digest(model), "labels": labels}
    compute = partial(_predict, model, draft, labels)
    return [
        Observed(response.id, **tensors)
        for response, tensors in stored(folder, "observed", responses, facts, compute)
    ]


def fit(
    training: Sequence[Observed], held_out: Sequence[Observed], settings: DiscoTrainSettings
) -> tuple[DiscoClassifier, list[float]]:
    """Train with early stopping; return the best classifier and the held-out loss per epoch."""
    features, labels = _concatenate(training)
    held_out_features, held_out_labels = _concatenate(held_out)
    accepted = float(labels.sum())
    balance = (len(labels) - accepted) / max(accepted, 1.0)
    weight = torch.tensor(max(balance, 1e-3) if settings.class_weights else 1.0)
    loss_of = partial(F.binary_cross_entropy_with_logits, pos_weight=weight)
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        classifier = DiscoClassifier(settings.hidden_size)
    classifier.fit_scaler(features)
    optimizer = torch.optim.AdamW(
        classifier.parameters(), settings.learning_rate, weight_decay=settings.weight_decay
    )
    best, history = copy.deepcopy(classifier.state_dict()), []
    for _ in tqdm(range(settings.max_epochs), desc="epochs", disable=None):
        for batch in torch.randperm(len(labels), generator=generator).split(settings.batch_size):
            loss = loss_of(classifier(features[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            history.append(float(loss_of(classifier(held_out_features), held_out_labels)))
        if history[-1] == min(history):
            best = copy.deepcopy(classifier.state_dict())
        elif len(history) - history.index(min(history)) > settings.patience:
            break
    classifier.load_state_dict(best)
    return classifier.eval(), history


@torch.no_grad()
def evaluate(
    classifier: DiscoClassifier, observed: Sequence[Observed], threshold: float
) -> dict[str, Any]:
    """Return precision, recall and F1 of rules that predict acceptance at the same positions.

    An answer is divided into the rounds of an ideal drafter, which drafts up to and including its
    first mismatch. So every position is the j-th draft token of one round. The static length k
    predicts acceptance for j < k. The truth is `Observed.matched`.

    Returns:
        "acceptance": the share of accepted positions; "rules": rule ("disco", "confidence",
        "static 1", ...) -> class ("accepted", "rejected") -> metrics.
    """
    features = torch.cat([o.features for o in observed])
    matched = torch.cat([o.matched for o in observed])
    positions = torch.cat([round_positions(o.matched) for o in observed])
    predictions = {
        "disco": classifier(features).sigmoid() >= threshold,
        "confidence": features[:, 0] >= CONFIDENCE_THRESHOLD,
        **{f"static {length}": positions < length for length in STATIC_LENGTHS},
    }
    rules = {
        name: {"accepted": _metrics(positive, matched), "rejected": _metrics(~positive, ~matched)}
        for name, positive in predictions.items()
    }
    return {"acceptance": float(matched.float().mean()), "rules": rules}


def round_positions(matched: Tensor) -> Tensor:
    """Return, as (T,) int64, the index of each position in its ideal round: 0 after a mismatch."""
    positions, position = [], 0
    for match in matched.tolist():
        positions.append(position)
        position = position + 1 if match else 0
    return torch.tensor(positions, dtype=torch.long)


def _metrics(predicted: Tensor, actual: Tensor) -> dict[str, float]:
    hits = int((predicted & actual).sum())
    num_predicted, num_actual = int(predicted.sum()), int(actual.sum())
    total = num_predicted + num_actual
    return {
        "precision": hits / num_predicted if num_predicted else 0.0,
        "recall": hits / num_actual if num_actual else 0.0,
        "f1": 2 * hits / total if total else 0.0,
    }


def _concatenate(observed: Sequence[Observed]) -> tuple[Tensor, Tensor]:
    return torch.cat([o.features for o in observed]), torch.cat([o.labels for o in observed])


def _predict(
    model: PreTrainedModel, draft: PreTrainedModel, labels: str, shard: Sequence[Response]
) -> dict[str, Tensor]:
    """Return the tensors of `Observed` for all positions of a shard."""
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for batch in answer_batches(shard):
        draft_logits = answer_logits(draft, batch, num_embeddings(model))
        target_logits = answer_logits(model, batch) if labels == "soft" else draft_logits
        answer = torch.tensor([token for response in batch for token in response.response])
        positions = torch.tensor([n for response in batch for n in range(len(response.response))])
        columns = (draft_logits, target_logits, answer, positions)
        chunks = zip(*(column.split(CHUNK_TOKENS) for column in columns), strict=True)
        for draft_chunk, target_chunk, tokens, at in chunks:
            probs = draft_chunk.float().softmax(dim=-1)
            matched = probs.argmax(dim=-1) == tokens.to(probs.device)
            label = matched.float()
            if labels == "soft":
                target = target_chunk.to(probs.device).float().softmax(dim=-1)
                # 1 - TV is the mass that both distributions share.
                label = torch.minimum(probs, target).sum(dim=-1)
            parts["features"].append(draft_features(probs, at.to(probs.device)).cpu())
            parts["matched"].append(matched.cpu())
            parts["labels"].append(label.cpu())
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def _load_draft(
    draft: DraftSpec, folder: Path, target: PreTrainedModel
) -> tuple[PreTrainedModel, str | dict[str, int] | None]:
    if isinstance(draft, PreTrainedModel):
        return resolve_draft_model(METHOD, draft, target), None
    name: str | dict[str, int] = draft
    if (count := named_layers(draft)) is not None:
        name = {"truncated": count}
    elif isinstance(draft, str) and Path(draft).is_dir():
        name = os.path.relpath(draft, folder)
        if Path(name).parts.count("..") > 1:
            raise OptionError(
                f"the draft model {draft} is not beside {folder}, and adapters can name only a "
                f"folder beside their own or a Hub id; pass a Hub id, or a link in {folder.parent}"
            )
    unfinished = SpecAdapter(METHOD, BaseModel.of(target), {"draft": name}, {}, folder)
    return find_draft_model(unfinished, target), name


def _digest(model: PreTrainedModel) -> str:
    """Return a hash over a few weights of every parameter."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        sample = flat[:: max(1, len(flat) // 8)].float().tolist()
        digest.update(json.dumps([name, sample]).encode())
    return digest.hexdigest()
